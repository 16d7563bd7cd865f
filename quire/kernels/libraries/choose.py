"""Which library, if any, attends for rows that catch up: what is installed, right and quicker than our own kernel here.

The loader calls `choose_library` with the model's shape, `quire doctor` prints verdicts. A library is never needed:
whatever goes wrong with one is a reason not to use it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from quire.kernels.libraries.seam import CatchUpKernel, with_library
from quire.kernels.table import REFERENCE, Ops
from quire.kernels.validation.trials import TrialShape, compare
from quire.types import QuireError

PROMPT_TOKENS = 4096  # of the step that is timed
MARGIN = 0.98  # of our own time: less than this is a gain
ROUNDS = 3
LAUNCHES = 8

Timer = Callable[[Callable[[], object]], float]


@dataclass(frozen=True, slots=True)
class Library:
    name: str
    asked_as: str  # by the setting `kernels`
    package: str
    versions: tuple[tuple[int, ...], tuple[int, ...]]  # from the one, below the other
    open: Callable[[torch.device], Sequence[CatchUpKernel]]
    is_ready: Callable[[TrialShape, torch.device], bool] = lambda shape, device: True  # without compiling first
    only_asked: str | None = None  # why it is never used without being asked for

    def installed(self) -> str | None:
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


def _open_flash_attention_3(device: torch.device) -> Sequence[CatchUpKernel]:
    from quire.kernels.libraries.flash_attention import open_version_3

    return open_version_3(device)


def _open_flash_attention_2(device: torch.device) -> Sequence[CatchUpKernel]:
    from quire.kernels.libraries.flash_attention import open_version_2

    return open_version_2(device)


def _open_flashinfer(device: torch.device) -> Sequence[CatchUpKernel]:
    from quire.kernels.libraries.flashinfer import open_library

    return open_library(device)


def _open_cudnn(device: torch.device) -> Sequence[CatchUpKernel]:
    from quire.kernels.libraries.cudnn import open_cudnn

    return open_cudnn(device)


def _is_flashinfer_compiled(shape: TrialShape, device: torch.device) -> bool:
    from quire.kernels.libraries.flashinfer import Kind, backend_for, is_compiled

    return is_compiled(Kind(backend_for(device), shape.dtype, shape.head_dim, shape.window is not None))


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
        only_asked="it stops to plan whenever prompts of another number or length come",
    ),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one library, or of one of its kernels."""

    name: str
    why: str  # it is used, or not
    installed: str | None = None
    kernel: CatchUpKernel | None = None  # None: it can't be used
    seconds: float = float("inf")  # for the step that is timed


def choose_library(
    ops: Ops,
    shape: TrialShape,
    device: torch.device,
    kernels: str,
    *,
    timer: Timer | None = None,
    libraries: Sequence[Library] = LIBRARIES,
) -> Ops:
    """The table, with the quickest library before its attention where one is quicker. `kernels` names a library that
    must be there and is used in any case, or "auto"."""
    unasked = [library for library in libraries if library.only_asked is None]
    wanted = unasked if kernels == "auto" else [library for library in libraries if library.asked_as == kernels]
    if not wanted:
        return ops
    if shape.cache_dtype != shape.dtype:
        if kernels == "auto":
            return ops
        raise refusal(kernels, "no library reads keys and values of another type than it computes in")
    if not any(library.installed() for library in wanted) and kernels == "auto":
        return ops
    judged = judge(ops, shape, device, kernels, wanted, timer or device_seconds)
    best = pick(judged, kernels)
    if best is None and kernels != "auto":
        raise refusal(kernels, "; ".join(f"{v.name}: {v.why}" for v in judged[1:]))
    return ops if best is None or best.kernel is None else with_library(ops, best.kernel)


def refusal(kernels: str, why: str) -> QuireError:
    """For who asked for a library by name: going on without it would be silent."""
    return QuireError("kernel_failed", f"kernels={kernels} can't be used ({why}).", "Use auto.", "kernels")


def pick(judged: Sequence[Verdict], kernels: str) -> Verdict | None:
    """The one that is used, if any: what was asked for by name, or what gains."""
    if kernels == "auto":
        return quickest(judged)
    return min((verdict for verdict in judged[1:] if verdict.kernel), key=lambda v: v.seconds, default=None)


def quickest(judged: Sequence[Verdict]) -> Verdict | None:
    """Of those that gain; the first verdict is our own kernel's."""
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
) -> list[Verdict]:
    """Our own kernel's verdict, then one for each kernel of each library, or for the library where none can be had."""
    timer = timer or device_seconds
    work = _Prompt.make(shape, device)
    judged = [Verdict("Triton", "our own", seconds=timer(work.launch(ops)))]
    for library in libraries:
        judged += _judge_library(library, ops, shape, device, kernels, work, timer)
    return judged


def _judge_library(
    library: Library, ops: Ops, shape: TrialShape, device: torch.device, kernels: str, work: _Prompt, timer: Timer
) -> Iterator[Verdict]:
    installed = library.installed()
    if installed is None:
        yield Verdict(library.name, "not installed")
        return
    low, high = library.versions
    if not low <= _numbers(installed) < high:
        known = f"{_dotted(low)} or later, before {_dotted(high)}"
        yield Verdict(library.name, f"this version is not known; {known} would be", installed)
        return
    if kernels not in ("auto", library.asked_as):
        yield Verdict(library.name, f"kernels={kernels} asks for something else", installed)
        return
    if kernels == "auto" and library.only_asked is not None:
        yield Verdict(library.name, f"{library.only_asked}; --kernels {library.asked_as} asks for it", installed)
        return
    try:
        if kernels == "auto" and not library.is_ready(shape, device):
            why = f"it has to compile first: --kernels {library.asked_as} does so, once"
            yield Verdict(library.name, why, installed)
            return
        opened = library.open(device)
    except Exception as error:  # built for another torch, say
        yield Verdict(library.name, _reason(error), installed)
        return
    if not opened:
        yield Verdict(library.name, "not for this GPU", installed)
    for kernel in opened:
        try:
            table = with_library(ops, kernel)
            _try(table, shape, device)
            plan = work.plan(table)
            launch = work.launch(table, plan)
            seconds = timer(launch)
            compare(launch(), work.launch(ops), shape.dtype)  # some take nothing but prompts such as this one
            if not plan.fits:
                yield Verdict(kernel.name, f"it does not attend for {work}", installed)
                continue
            yield Verdict(kernel.name, "right", installed, kernel, seconds)
        except torch.OutOfMemoryError:
            yield Verdict(kernel.name, "no memory to try it", installed)
        except Exception as error:  # whatever a compiler, a driver or a kernel may say
            yield Verdict(kernel.name, _reason(error), installed)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def _numbers(text: str) -> tuple[int, ...]:
    """2.8.3.post1 -> (2, 8, 3)"""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


# ---------------------------------------------------------------------------------------------------------------------
# Trying and timing


def _try(ops: Ops, shape: TrialShape, device: torch.device) -> None:
    """A decode, a fresh prompt and one behind cached tokens, in one step, against the reference. Raises."""
    step = _Prompt.make(shape, device, counts=[1, 20, 9], lengths=[40, 20, 300])
    compare(step.launch(ops)(), step.launch(REFERENCE), shape.dtype)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Rows over caches of random numbers, whose pages lie in no order."""

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
    ) -> _Prompt:
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
        shape = self.shape
        return ops.plan_attention(
            self.table, self.positions, self.counts, self.lengths, shape.page_tokens, shape.window, shape.dtype
        )

    def launch(self, ops: Ops, plan: Any = None) -> Callable[[], Tensor]:
        """One layer's attention; without a plan, with one that is made now."""
        shape = self.shape
        plan = self.plan(ops) if plan is None else plan
        return lambda: ops.paged_attention(self.q, *self.caches, plan, shape.head_dim**-0.5)


def device_seconds(launch: Callable[[], object]) -> float:
    """One launch by the device's clock, within several so that the host's time does not count; the best of a few."""
    launch()  # compiles and warms
    best = float("inf")
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(LAUNCHES):
            launch()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3 / LAUNCHES)
    return best
