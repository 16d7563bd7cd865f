"""Choice of a library for prefill attention: one that is installed, correct and faster than our own kernel on this GPU.

The loader calls `choose_library` with the model's shape; `quire doctor` prints the verdicts. A library is never needed:
any failure of one is a reason not to use it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from quire.kernels.libraries.seam import PrefillKernel, with_library
from quire.kernels.table import REFERENCE, Ops
from quire.kernels.timing import Timer, device_seconds
from quire.kernels.validation.trials import TrialShape, compare
from quire.types import QuireError

PROMPT_TOKENS = 4096  # tokens of the step that is timed
MARGIN = 0.98  # fraction of our own kernel's time below which a library is faster


@dataclass(frozen=True, slots=True)
class Library:
    """A library with attention kernels, how it is selected, and how its kernels are opened."""

    name: str
    setting: str  # name in the setting `kernels`
    package: str
    versions: tuple[tuple[int, ...], tuple[int, ...]]  # from the first, before the second
    open: Callable[[torch.device], Sequence[PrefillKernel]]
    is_ready: Callable[[TrialShape, torch.device], bool] = lambda shape, device: True  # without compiling first
    opt_in_reason: str | None = None  # reason why the library must be asked for by name

    def installed(self) -> str | None:
        """Version of the installed package; None if it is not installed."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


def _open_flash_attention_3(device: torch.device) -> Sequence[PrefillKernel]:
    from quire.kernels.libraries.flash_attention import open_version_3

    return open_version_3(device)


def _open_flash_attention_2(device: torch.device) -> Sequence[PrefillKernel]:
    from quire.kernels.libraries.flash_attention import open_version_2

    return open_version_2(device)


def _open_flashinfer(device: torch.device) -> Sequence[PrefillKernel]:
    from quire.kernels.libraries.flashinfer import open_library

    return open_library(device)


def _open_cudnn(device: torch.device) -> Sequence[PrefillKernel]:
    from quire.kernels.libraries.cudnn import open_cudnn

    return open_cudnn(device)


def _is_flashinfer_compiled(shape: TrialShape, device: torch.device) -> bool:
    from quire.kernels.libraries.flashinfer import ModuleKind, backend_for, is_compiled

    return is_compiled(ModuleKind(backend_for(device), shape.dtype, shape.head_dim, shape.window is not None))


LIBRARIES = (
    Library("FlashAttention-3", "flash-attn", "flash-attn-3", ((3, 0), (4,)), _open_flash_attention_3),
    Library("FlashAttention", "flash-attn", "flash-attn", ((2, 8), (3,)), _open_flash_attention_2),
    Library(
        "FlashInfer", "flashinfer", "flashinfer-python", ((0, 6), (0, 8)), _open_flashinfer, _is_flashinfer_compiled
    ),
    Library(
        "cuDNN",
        "cudnn",
        "torch",
        ((2, 11), (3,)),
        _open_cudnn,
        opt_in_reason="it stalls a step to plan each new number or length of prompts",
    ),
)


@dataclass(frozen=True, slots=True)
class LibraryVerdict:
    """Result of judging one library, or one of its kernels."""

    name: str
    why: str  # why it is used or not
    installed: str | None = None
    kernel: PrefillKernel | None = None  # None: it cannot be used
    seconds: float = float("inf")  # time of the timed step


def choose_library(
    ops: Ops,
    shape: TrialShape,
    device: torch.device,
    kernels: str,
    *,
    timer: Timer | None = None,
    libraries: Sequence[Library] = LIBRARIES,
) -> Ops:
    """Return `ops` with the fastest library's attention where one is faster. `kernels` is "auto" or names a library,
    which must then work and is used in any case."""
    unasked = [library for library in libraries if library.opt_in_reason is None]
    wanted = unasked if kernels == "auto" else [library for library in libraries if library.setting == kernels]
    if not wanted:
        return ops
    if shape.cache_dtype != shape.dtype:
        if kernels == "auto":
            return ops
        raise refusal(kernels, "no library supports a KV cache of another type than the model's")
    if not any(library.installed() for library in wanted) and kernels == "auto":
        return ops
    judged = judge(ops, shape, device, kernels, wanted, timer or device_seconds)
    best = pick(judged, kernels)
    if best is None and kernels != "auto":
        raise refusal(kernels, "; ".join(f"{v.name}: {v.why}" for v in judged[1:]))
    return ops if best is None or best.kernel is None else with_library(ops, best.kernel)


def refusal(kernels: str, why: str) -> QuireError:
    """Error for a library that was asked for by name: continuing without it would be silent."""
    return QuireError(
        "kernel_failed",
        f"kernels={kernels} can't be used ({why}).",
        "Use kernels=auto.",
        "kernels",
    )


def pick(judged: Sequence[LibraryVerdict], kernels: str) -> LibraryVerdict | None:
    """The verdict whose kernel is used: the library asked for by name, or else one that is faster. None if there is
    none."""
    if kernels == "auto":
        return quickest(judged)
    return min((verdict for verdict in judged[1:] if verdict.kernel), key=lambda v: v.seconds, default=None)


def quickest(judged: Sequence[LibraryVerdict]) -> LibraryVerdict | None:
    """The fastest of the kernels that are faster than our own, whose verdict comes first."""
    ours = judged[0]
    gaining = [verdict for verdict in judged[1:] if verdict.kernel and verdict.seconds < MARGIN * ours.seconds]
    return min(gaining, key=lambda verdict: verdict.seconds, default=None)


def judge(
    ops: Ops,
    shape: TrialShape,
    device: torch.device,
    kernels: str,
    libraries: Sequence[Library] = LIBRARIES,
    timer: Timer | None = None,
) -> list[LibraryVerdict]:
    """Our own kernel's verdict, then one per kernel of each library, or one for a library without usable kernels."""
    timer = timer or device_seconds
    work = _TrialPrompt.make(shape, device)
    judged = [LibraryVerdict("Triton", "Quire's own kernel", seconds=timer(work.launch(ops)))]
    for library in libraries:
        judged += _judge_library(library, ops, shape, device, kernels, work, timer)
    return judged


def _judge_library(
    library: Library, ops: Ops, shape: TrialShape, device: torch.device, kernels: str, work: _TrialPrompt, timer: Timer
) -> Iterator[LibraryVerdict]:
    """Verdicts of a library's kernels; one verdict with the reason if none can be used."""
    installed = library.installed()
    if installed is None:
        yield LibraryVerdict(library.name, "not installed")
        return
    low, high = library.versions
    if not low <= _version_numbers(installed) < high:
        known = f"{_version_text(low)} or later, before {_version_text(high)}"
        yield LibraryVerdict(library.name, f"this version is not supported; use {known}", installed)
        return
    if kernels not in ("auto", library.setting):
        yield LibraryVerdict(library.name, f"kernels={kernels} selects another library", installed)
        return
    if kernels == "auto" and library.opt_in_reason is not None:
        yield LibraryVerdict(
            library.name, f"{library.opt_in_reason}; --kernels {library.setting} selects it", installed
        )
        return
    try:
        if kernels == "auto" and not library.is_ready(shape, device):
            why = f"not compiled yet: --kernels {library.setting} compiles it, once"
            yield LibraryVerdict(library.name, why, installed)
            return
        opened = library.open(device)
    except Exception as error:  # for example, built for another torch
        yield LibraryVerdict(library.name, _reason(error), installed)
        return
    if not opened:
        yield LibraryVerdict(library.name, "no kernel for this GPU", installed)
    for kernel in opened:
        try:
            table = with_library(ops, kernel)
            _check_against_reference(table, shape, device)
            plan = work.plan(table)
            launch = work.launch(table, plan)
            seconds = timer(launch)
            compare(launch(), work.launch(ops), shape.dtype)  # some kernels support only prompts like this one
            if not plan.fits:
                yield LibraryVerdict(kernel.name, f"it does not support {work}", installed)
                continue
            yield LibraryVerdict(kernel.name, "correct", installed, kernel, seconds)
        except torch.OutOfMemoryError:
            yield LibraryVerdict(kernel.name, "out of memory in its trial", installed)
        except Exception as error:  # any error of a compiler, a driver or a kernel
            yield LibraryVerdict(kernel.name, _reason(error), installed)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def _version_numbers(text: str) -> tuple[int, ...]:
    """The numbers of a version: 2.8.3.post1 -> (2, 8, 3)."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def _version_text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


# ---------------------------------------------------------------------------------------------------------------------
# Trying and timing


def _check_against_reference(ops: Ops, shape: TrialShape, device: torch.device) -> None:
    """Compare a decode row, a fresh prompt and a prompt behind cached tokens, in one step, with the reference. Raises
    if they differ."""
    step = _TrialPrompt.make(shape, device, counts=[1, 20, 9], lengths=[40, 20, 300])
    compare(step.launch(ops)(), step.launch(REFERENCE), shape.dtype)


@dataclass(frozen=True, slots=True)
class _TrialPrompt:
    """A step's inputs over caches of random numbers, with pages in random order."""

    shape: TrialShape
    q: Tensor  # [tokens, heads, head_dim]
    caches: tuple[Tensor, Tensor]
    table: Tensor
    positions: Tensor
    counts: list[int]
    lengths: list[int]

    @classmethod
    def make(
        cls, shape: TrialShape, device: torch.device, counts: list[int] | None = None, lengths: list[int] | None = None
    ) -> _TrialPrompt:
        """Create inputs. By default one prompt of PROMPT_TOKENS or the model's maximum length."""
        counts = counts or [min(PROMPT_TOKENS, shape.max_len)]
        lengths = lengths or counts
        need = [-(-length // shape.page_tokens) for length in lengths]
        order = torch.randperm(sum(need)) + 1
        table = torch.zeros(len(counts), max(need) + 1, dtype=torch.int32)
        for row, pages in enumerate(order.split(need)):
            table[row, : len(pages)] = pages
        size = (sum(need) + 1, shape.page_tokens, shape.num_kv_heads, shape.head_dim)
        keys, values = (torch.randn(size, device=device).to(shape.dtype) for _ in range(2))
        positions = [length - count + i for count, length in zip(counts, lengths, strict=True) for i in range(count)]
        q = torch.randn(len(positions), shape.num_heads, shape.head_dim, device=device).to(shape.dtype)
        return cls(shape, q, (keys, values), table.to(device), torch.tensor(positions, device=device), counts, lengths)

    def __str__(self) -> str:
        shape = self.shape
        window = "" if shape.window is None else f" and a window of {shape.window}"
        dtype = str(shape.dtype).removeprefix("torch.")
        return f"prompts of {max(self.counts)} tokens with heads of {shape.head_dim} in {dtype}{window}"

    def plan(self, ops: Ops) -> Any:
        """The attention plan that `ops` makes for these inputs."""
        shape = self.shape
        return ops.plan_attention(
            self.table, self.positions, self.counts, self.lengths, shape.page_tokens, shape.window, shape.dtype
        )

    def launch(self, ops: Ops, plan: Any = None) -> Callable[[], Tensor]:
        """A function that runs one layer's attention, with `plan` or a new plan."""
        shape = self.shape
        plan = self.plan(ops) if plan is None else plan
        return lambda: ops.paged_attention(self.q, *self.caches, plan, shape.head_dim**-0.5)
