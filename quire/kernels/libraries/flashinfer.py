"""FlashInfer for rows that catch up: its wrapper for prompts over paged caches, planned anew in every step.

The wrapper cuts a step's work on the host, from lengths that must be exact: none of our rows drafts yet. It writes
what it planned to pinned memory that the device reads later, so there are several wrappers, taken in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.libraries.seam import CatchUps
from quire.kernels.upload import upload

WORKSPACE_BYTES = 128 << 20  # what FlashInfer asks for
NUM_WRAPPERS = 4
HEAD_DIMS = (64, 128, 256)


@dataclass(slots=True)
class _Slot:
    wrapper: Any
    sent: torch.cuda.Event | None = None  # when what it planned last has reached the device


class FlashInfer:
    name = "FlashInfer"

    def __init__(self, make_wrapper: Callable[[], Any]):
        self._slots = [_Slot(make_wrapper()) for _ in range(NUM_WRAPPERS)]
        self._turn = 0

    def fits(self, q: Tensor, k_cache: Tensor, rows: CatchUps) -> bool:
        return q.dtype in (torch.bfloat16, torch.float16) and q.shape[2] in HEAD_DIMS

    def plan(self, rows: CatchUps, q: Tensor, k_cache: Tensor, scale: float) -> Any:
        slot = self._slots[self._turn % NUM_WRAPPERS]
        self._turn += 1
        if slot.sent is not None:
            slot.sent.synchronize()  # some steps ago: nothing to wait for
        lengths, size = np.array(rows.len_bounds, np.int64), rows.page_tokens
        num_pages = -(-lengths // size)
        ends = np.cumsum(num_pages)
        owner = np.repeat(np.arange(len(lengths)), num_pages)
        column = np.arange(ends[-1]) - np.repeat(ends - num_pages, num_pages)
        places = upload({"pages": {"places": owner * rows.page_table.shape[1] + column}}, q.device)["pages"]["places"]
        slot.wrapper.plan(
            _ints([0, *np.cumsum(rows.counts)]), _ints([0, *ends]), rows.page_table.reshape(-1)[places],
            _ints((lengths - 1) % size + 1), q.shape[1], k_cache.shape[2], q.shape[2], size, causal=True,
            sm_scale=scale, window_left=-1 if rows.window is None else rows.window - 1, q_data_type=q.dtype,
            kv_data_type=k_cache.dtype,
        )  # fmt: skip
        if q.is_cuda:
            slot.sent = torch.cuda.Event()
            slot.sent.record()
        return slot.wrapper

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, planned: Any) -> Tensor:
        out: Tensor = planned.run(q, (k_cache, v_cache))
        return out


def _ints(values: Any) -> Tensor:
    """Where the library wants to read them: on the host."""
    return torch.from_numpy(np.array(values, np.int32))


def is_compiled(dtype: torch.dtype, head_dim: int, window: bool, device: torch.device) -> bool:
    """Whether its kernel of this kind lies on disk already. FlashInfer compiles at first sight, for a minute or more:
    nobody who has not asked for it should wait for that."""
    try:
        from flashinfer.jit.attention import gen_batch_prefill_module  # type: ignore[import-not-found]

        backend = "fa3" if torch.cuda.get_device_capability(device)[0] == 9 else "fa2"
        spec = gen_batch_prefill_module(
            backend, dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, window, False, False
        )
        return bool(spec.is_compiled)
    except Exception:  # not part of what it promises to keep: whatever changed there, it is not known to be compiled
        return False


def open_library(device: torch.device) -> list[FlashInfer]:
    import flashinfer

    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return [FlashInfer(lambda: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD"))]
