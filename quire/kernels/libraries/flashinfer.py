"""FlashInfer for prefill rows: its prefill wrapper over paged caches, planned anew in every step.

The wrapper splits a step's work on the host by lengths that must be exact, which they are as long as no row drafts. It
writes its plan to pinned memory that the device reads later, so several wrappers are used in turn. FlashInfer compiles
each `ModuleKind` of kernel at first use, for a minute or more, which must not happen unless the configuration asks for
it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.libraries.seam import PrefillRows
from quire.kernels.upload import upload

WORKSPACE_BYTES = 128 << 20  # FlashInfer's recommendation
NUM_WRAPPERS = 4
HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class ModuleKind:
    """All parameters that distinguish FlashInfer's compiled modules. Both the lookup on disk and the wrapper's plan use
    it, so that the two cannot differ."""

    backend: str
    dtype: torch.dtype
    head_dim: int
    windowed: bool

    def module(self) -> Any:
        """FlashInfer's specification of the module: its location and build commands."""
        from flashinfer.jit.attention import gen_batch_prefill_module

        types = (self.dtype, self.dtype, self.dtype, torch.int32)  # of q, keys and values, result, indices
        return gen_batch_prefill_module(
            self.backend, *types, self.head_dim, self.head_dim, 0, self.windowed, False, False
        )

    @property
    def options(self) -> dict[str, Any]:
        """The same parameters for the wrapper's plan, which derives the window flag itself."""
        types = {"q_data_type": self.dtype, "kv_data_type": self.dtype, "o_data_type": self.dtype}
        return types | {"pos_encoding_mode": "NONE", "logits_soft_cap": 0.0, "use_fp16_qk_reduction": False}


def backend_for(device: torch.device) -> str:
    """The backend that "auto" would select, chosen explicitly."""
    return "fa3" if torch.cuda.get_device_capability(device)[0] == 9 else "fa2"


def is_compiled(kind: ModuleKind) -> bool:
    """Whether the wrapper would load this kind without compiling."""
    try:
        module = kind.module()
        return bool(module.is_aot or (module.is_compiled and _is_up_to_date(module)))
    except Exception:  # not a stable API: after any change there, assume that it has to compile
        return False


def _is_up_to_date(module: Any) -> bool:
    """Whether ninja has nothing to do. An existing library does not suffice: before every load FlashInfer runs ninja in
    the module's own folder, which compiles everything again if its log is missing, as after a build of several
    modules."""
    module.write_ninja()
    command = ["ninja", "-n", "-C", str(module.build_dir), "-f", str(module.ninja_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return "no work to do" in said


@dataclass(slots=True)
class _Slot:
    """A wrapper and the event after which it may be planned again."""

    wrapper: Any
    sent: torch.cuda.Event | None = None  # recorded when its last plan has reached the device


class FlashInfer:
    """A `PrefillKernel` on FlashInfer."""

    name = "FlashInfer"

    def __init__(self, make_wrapper: Callable[[], Any], backend: str, is_compiled: Callable[[ModuleKind], bool]):
        self._slots = [_Slot(make_wrapper()) for _ in range(NUM_WRAPPERS)]
        self._turn = 0
        self._backend, self._is_compiled = backend, is_compiled
        self._kinds: dict[ModuleKind, bool] = {}  # whether each kind is used

    def fits(self, q: Tensor, k_cache: Tensor, rows: PrefillRows) -> bool:
        if q.dtype not in (torch.bfloat16, torch.float16) or q.shape[2] not in HEAD_DIMS:
            return False
        kind = self._kind(q, rows)
        if kind not in self._kinds:
            # The first kind is tried before a model is built, when compiling is allowed. Others, for example of layers
            # with a window, first occur while requests wait.
            self._kinds[kind] = not self._kinds or self._is_compiled(kind)
        return self._kinds[kind]

    def _kind(self, q: Tensor, rows: PrefillRows) -> ModuleKind:
        return ModuleKind(self._backend, q.dtype, q.shape[2], rows.window is not None)

    def plan(self, rows: PrefillRows, q: Tensor, k_cache: Tensor, scale: float) -> Any:
        slot = self._slots[self._turn % NUM_WRAPPERS]
        self._turn += 1
        if slot.sent is not None:
            slot.sent.synchronize()  # several steps ago, so already complete
        lengths, size = np.array(rows.len_bounds, np.int64), rows.page_tokens
        num_pages = -(-lengths // size)
        ends = np.cumsum(num_pages)
        owner = np.repeat(np.arange(len(lengths)), num_pages)
        column = np.arange(ends[-1]) - np.repeat(ends - num_pages, num_pages)
        places = upload({"pages": {"places": owner * rows.page_table.shape[1] + column}}, q.device)["pages"]["places"]
        slot.wrapper.plan(
            _ints([0, *np.cumsum(rows.counts)]),
            _ints([0, *ends]),
            rows.page_table.reshape(-1)[places],
            _ints((lengths - 1) % size + 1),
            q.shape[1],
            k_cache.shape[2],
            q.shape[2],
            size,
            causal=True,
            sm_scale=scale,
            window_left=-1 if rows.window is None else rows.window - 1,
            **self._kind(q, rows).options,
        )
        if q.is_cuda:
            slot.sent = torch.cuda.Event()
            slot.sent.record()
        return slot.wrapper

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, planned: Any) -> Tensor:
        out: Tensor = planned.run(q, (k_cache, v_cache))
        return out


def _ints(values: Any) -> Tensor:
    """int32 tensor on the host, where the library reads it."""
    return torch.from_numpy(np.array(values, np.int32))


def open_library(device: torch.device) -> list[FlashInfer]:
    """FlashInfer's kernel with a workspace on the device."""
    import flashinfer

    backend = backend_for(device)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def make_wrapper() -> Any:
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)

    return [FlashInfer(make_wrapper, backend, is_compiled)]
