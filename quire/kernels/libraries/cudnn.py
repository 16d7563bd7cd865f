"""cuDNN's attention, which torch carries, for prompts of equal length of which nothing is cached.

It wants keys in one piece, so each layer's pages are copied out first, and it plans every new shape for tens of
milliseconds. So nothing is asked of it when a model is loaded: a shape that has come often is tried within a step, in
which a few layers attend twice. Nobody waits for how that ended; a later step of the same shape finds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from quire.kernels.libraries.seam import CatchUps
from quire.kernels.table import Ops
from quire.kernels.trial import TOLERANCE

SIGHTINGS = 32  # of a shape before it is tried: planning it costs the gain of as many steps
MAX_SHAPES = 8  # that are ever tried
TRIED_LAYERS = 5  # the first of them plans and is not timed
MARGIN = 0.98  # of our own time: less than this is a gain
MIN_TOKENS = 2048  # of a step: below, launching takes longer than attending
MAX_TOKENS = 1 << 16  # whose keys and values are copied: 2 x 128 MiB with 8 heads of 128
MAX_HEAD_DIM = 128

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """What cuDNN plans for."""

    num_rows: int
    num_tokens: int  # of each row
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


class Clock(Protocol):
    """The device's, read without waiting."""

    def mark(self) -> Any: ...

    def has_passed(self, mark: Any) -> bool: ...

    def seconds(self, begin: Any, end: Any) -> float: ...


class DeviceClock:
    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) / 1e3


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal; q [rows, heads, tokens, head_dim], keys and values with their own number of heads."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


@dataclass(slots=True)
class Trial:
    """Both ways in a few layers of one step."""

    clock: Clock
    spans: list[tuple[Any, Any, Any]] = field(default_factory=list)  # marks: before ours, between, after cuDNN's
    matches: list[Tensor] = field(default_factory=list)  # bool, on their way to the host
    last: Any = None  # the mark behind the last comparison
    failed: bool = False

    @property
    def is_complete(self) -> bool:
        return self.failed or len(self.spans) >= TRIED_LAYERS

    def run(self, ours: Callable[[], Tensor], theirs: Callable[[], Tensor]) -> Tensor:
        """Ours, whatever comes of it."""
        begin = self.clock.mark()
        wanted = ours()
        between = self.clock.mark()
        try:
            got = theirs()
        except Exception:  # whatever a planner, a driver or an allocator may say
            self.failed = True
            return wanted
        self.spans.append((begin, between, self.clock.mark()))
        error, size = (got.float() - wanted.float()).norm(), wanted.float().norm()
        is_close = error <= TOLERANCE[wanted.dtype] * size  # not where either is NaN
        self.matches.append(is_close.to("cpu", non_blocking=True))
        self.last = self.clock.mark()
        return wanted

    def verdict(self) -> bool | None:
        """Whether cuDNN is right and quicker; None: not known yet."""
        if self.failed:
            return False
        if not self.is_complete or not self.clock.has_passed(self.last):
            return None
        timed = self.spans[1:]
        ours = min(self.clock.seconds(begin, between) for begin, between, _ in timed)
        theirs = min(self.clock.seconds(between, end) for _, between, end in timed)
        return all(bool(match) for match in self.matches) and theirs < MARGIN * ours


@dataclass(slots=True)
class _Planned:
    shape: Shape
    pages: Tensor  # [rows * pages of a row] int32: what is copied, in order
    scale: float
    trial: Trial | None
    ours: Any  # our own plan for the same rows, where it is a trial


class CudnnAttention:
    """A `CatchUpKernel` that fits the shapes it has won, and for a step those it tries."""

    name = "cuDNN"

    def __init__(self, ours: Ops, attend: Attend = cudnn_attention, *, clock: Clock | None = None,
                 sightings: int = SIGHTINGS, trusted: bool = False):  # fmt: skip
        """`ours`: what it is measured against; `trusted`: it is not measured, for benchmarks and tests of its own."""
        self._ours, self._attend = ours, attend
        self._clock = clock or DeviceClock()
        self._sightings, self._trusted = sightings, trusted
        self._seen: Counter[Shape] = Counter()
        self._trials: dict[Shape, Trial] = {}
        self.verdicts: dict[Shape, bool] = {}

    def fits(self, q: Tensor, k_cache: Tensor, rows: CatchUps) -> bool:
        if not _is_fresh(q, rows):
            return False
        shape = _shape(q, k_cache, rows)
        if self._trusted:
            return True
        trial = self._trials.get(shape)
        if trial is not None and shape not in self.verdicts:
            verdict = trial.verdict()
            if verdict is not None:
                self.verdicts[shape] = verdict
        if trial is None and len(self._trials) < MAX_SHAPES:
            self._seen[shape] += 1
            if self._seen[shape] > self._sightings:
                self._trials[shape] = Trial(self._clock)
                return True
        return self.verdicts.get(shape, False)

    def plan(self, rows: CatchUps, q: Tensor, k_cache: Tensor, scale: float) -> _Planned:
        shape = _shape(q, k_cache, rows)
        per_row = -(-shape.num_tokens // rows.page_tokens)
        pages = rows.page_table[:, :per_row].reshape(-1)
        trial = None if self._trusted or shape in self.verdicts else self._trials[shape]
        ours = None
        if trial is not None:
            ours = self._ours.plan_attention(
                rows.page_table, rows.positions, rows.counts, rows.len_bounds, rows.page_tokens, None, k_cache.dtype
            )
        return _Planned(shape, pages, scale, trial, ours)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, planned: _Planned) -> Tensor:
        def theirs() -> Tensor:
            return self._compute(q, k_cache, v_cache, planned)

        def ours() -> Tensor:
            return self._ours.paged_attention(q, k_cache, v_cache, planned.ours, planned.scale).view_as(q)

        if planned.trial is None:
            return theirs()
        return ours() if planned.trial.is_complete else planned.trial.run(ours, theirs)

    def _compute(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, planned: _Planned) -> Tensor:
        shape = planned.shape
        rows, tokens = shape.num_rows, shape.num_tokens
        k, v = (
            cache.index_select(0, planned.pages).view(rows, -1, *cache.shape[2:])[:, :tokens].transpose(1, 2)
            for cache in (k_cache, v_cache)
        )  # [rows, kv_heads, tokens, head_dim]
        out = self._attend(q.unflatten(0, (rows, tokens)).transpose(1, 2), k, v, planned.scale)
        return out.transpose(1, 2).reshape(q.shape)


def _shape(q: Tensor, k_cache: Tensor, rows: CatchUps) -> Shape:
    return Shape(len(rows.counts), rows.counts[0], q.shape[1], k_cache.shape[2], q.shape[2], q.dtype)


def _is_fresh(q: Tensor, rows: CatchUps) -> bool:
    """Prompts of one length, all of whose keys are this step's; enough of them, and not too many."""
    count = rows.counts[0]
    num_tokens = count * len(rows.counts)
    return (
        rows.window is None
        and all(other == count for other in rows.counts)
        and rows.len_bounds == rows.counts
        and MIN_TOKENS <= num_tokens <= MAX_TOKENS
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] % 8 == 0
        and q.shape[2] <= MAX_HEAD_DIM
    )
