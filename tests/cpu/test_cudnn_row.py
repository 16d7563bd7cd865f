"""cuDNN's attention as a row of the ops table, without cuDNN: torch's own attention on a CPU stands in for it, and a
clock that says what it is told. What is tried, when, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quire.kernels.libraries import cudnn
from quire.kernels.libraries.choose import with_cudnn
from quire.kernels.libraries.cudnn import TRIED_LAYERS, CudnnAttention
from quire.kernels.libraries.seam import LibraryPlan, with_library
from quire.kernels.table import REFERENCE, Ops
from quire.kernels.trial import TrialShape
from tests.gpu.library_checks import check_fresh
from tests.gpu.where import Where

SCALE = 0.2


@pytest.fixture(autouse=True)
def small_steps_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "MIN_TOKENS", 16)


def refuse() -> Tensor:
    raise RuntimeError("No available kernel")


class Library:
    """Counts its calls and computes, or does what it is told instead."""

    def __init__(self, instead: Callable[[Tensor], Tensor] | None = None):
        self.num_calls = 0
        self._instead = instead

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.num_calls += 1
        assert q.shape[::2] == k.shape[::2] and k.shape == v.shape and q.shape[3] == k.shape[3]
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out if self._instead is None else self._instead(out)


class Clock:
    """Ours takes one second, theirs as long as it is told; marks pass when they are let."""

    def __init__(self, theirs: float, passes: bool = True):
        self._theirs, self.passes = theirs, passes
        self._num_marks = 0

    def mark(self) -> int:
        self._num_marks += 1
        return self._num_marks

    def has_passed(self, mark: int) -> bool:
        return self.passes

    def seconds(self, begin: int, end: int) -> float:
        return (
            1.0 if begin % 4 == 1 else self._theirs
        )  # four marks a layer that is tried: ours is between the first two


class Steps:
    """Prompts of 20 tokens, two in a step, over pages in no order; each step has two layers more than are tried."""

    def __init__(self, ops: Ops, dtype: torch.dtype = torch.float16):
        self.ops, self.dtype = ops, dtype
        self.table = torch.tensor([[4, 2], [1, 3]], dtype=torch.int32)
        self.caches = torch.randn(2, 5, 16, 2, 64).to(dtype)
        self.q = torch.randn(40, 4, 64).to(dtype)

    def run(self, *, window: int | None = None, counts: tuple[int, ...] = (20, 20), starts: tuple[int, ...] = (0, 0),
            **extra: Any) -> Any:  # fmt: skip
        """One step, which must come to the reference's result in every layer."""
        bounds = [start + count for start, count in zip(starts, counts, strict=True)]
        positions = torch.cat([torch.arange(s, b) for s, b in zip(starts, bounds, strict=True)])
        args = (self.table, positions, list(counts), bounds, 16, window, self.dtype)
        plan, wanted = self.ops.plan_attention(*args), REFERENCE.plan_attention(*args)
        for _ in range(TRIED_LAYERS + 2):
            q = self.q[: sum(counts)]
            got = self.ops.paged_attention(q, *self.caches, plan, SCALE, **extra)
            torch.testing.assert_close(
                got, REFERENCE.paged_attention(q, *self.caches, wanted, SCALE, **extra), rtol=2e-2, atol=2e-2
            )
        return plan


def row(library: Library, clock: Clock, **options: Any) -> Steps:
    return Steps(with_library(REFERENCE, CudnnAttention(REFERENCE, library, clock=clock, **options)))


def test_a_shape_that_came_often_is_tried_in_a_few_layers_and_used_where_it_is_quicker() -> None:
    library = Library()
    steps = row(library, Clock(theirs=0.5), sightings=3)
    for _ in range(3):
        steps.run()
    assert library.num_calls == 0, "it costs time to plan, so it waits until that may pay"
    steps.run()
    assert library.num_calls == TRIED_LAYERS, "and then some layers attend twice"
    steps.run()
    assert library.num_calls == 2 * TRIED_LAYERS + 2, "from now on all of them"


@pytest.mark.parametrize(("instead", "theirs"), [
    (None, 0.99),  # a gain that small is noise
    (None, 1.5),
    (lambda out: out * 1.2, 0.1),
    (lambda out: out * torch.nan, 0.1),
    (lambda out: refuse(), 0.1),
])  # fmt: skip
def test_what_is_slower_wrong_or_broken_is_tried_once(instead: Any, theirs: float) -> None:
    library = Library(instead)
    steps = row(library, Clock(theirs), sightings=0)
    for _ in range(4):
        steps.run()
    assert library.num_calls in (1, TRIED_LAYERS)


def test_nobody_waits_for_how_it_ended() -> None:
    library, clock = Library(), Clock(theirs=0.5, passes=False)
    steps = row(library, clock, sightings=0)
    for _ in range(3):
        steps.run()
    assert library.num_calls == TRIED_LAYERS, "not known yet: ours"
    clock.passes = True
    steps.run()
    assert library.num_calls > TRIED_LAYERS


@pytest.mark.parametrize("options", [
    {"window": 7},
    {"counts": (20, 19)},
    {"counts": (20, 1)},
    {"counts": (12, 12), "starts": (8, 8)},  # behind something cached
    {"softcap": 3.0},
    {"sinks": torch.zeros(4)},
    {"counts": (7, 7)},  # too few to be worth it
])  # fmt: skip
def test_other_steps_never_ask_for_it(options: dict[str, Any]) -> None:
    library = Library()
    plan = row(library, Clock(0.5), trusted=True).run(**options)
    assert isinstance(plan, LibraryPlan) and not plan.fits and library.num_calls == 0


def test_a_cache_of_another_type_and_captured_steps_stay_with_our_own() -> None:
    library = Library()
    steps = row(library, Clock(0.5), trusted=True)
    steps.dtype, steps.q = torch.float32, steps.q.float()
    steps.caches = steps.caches.float()
    assert not steps.run().fits and library.num_calls == 0
    captured: list[Any] = []
    inner = replace(REFERENCE, plan_attention=lambda *args, **kwargs: captured.append(kwargs))
    ops = with_library(inner, CudnnAttention(inner, library, clock=Clock(0.5), trusted=True))
    ops.plan_attention(steps.table, torch.arange(40), [], [], 16, None, torch.float16, work="lists")
    assert captured == [{"work": "lists"}]


def test_so_many_shapes_are_tried_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "MAX_SHAPES", 1)
    library = Library()
    steps = row(library, Clock(theirs=0.5), sightings=0)
    steps.run(counts=(18, 18))
    for _ in range(3):
        steps.run()
    assert library.num_calls == TRIED_LAYERS


def test_prompts_behind_decodes_are_its_own() -> None:
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    kernel = CudnnAttention(REFERENCE, Library(), clock=Clock(0.5), trusted=True)
    check_fresh(REFERENCE, kernel, Where("cpu", False, (torch.float16,), seed))


def test_it_is_no_row_without_a_gpu() -> None:
    shape = TrialShape(width=64, inner_width=128, num_heads=4, num_kv_heads=2, head_dim=64, page_tokens=16, window=None,
                       qk_norm=False, dtype=torch.float16, cache_dtype=torch.float16)  # fmt: skip
    assert with_cudnn(REFERENCE, shape, torch.device("cpu")) is REFERENCE
