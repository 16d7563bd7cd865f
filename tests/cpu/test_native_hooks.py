"""The hooks of the native stack: a reduction after each block, adapters beside every product, nothing without them."""

from __future__ import annotations

import threading
from collections import Counter
from ctypes import c_float, c_int64, c_void_p, cast

import pytest
import torch
from torch import Tensor

from quire.kernels.native.hook_structs import HookFailed
from quire.kernels.native.hooks import (
    Hook,
    HookedProduct,
    PythonAdapters,
    PythonReduction,
    ReductionCall,
)
from quire.kernels.native.library import ISAS
from tests.cpu.native_isas import open_or_skip
from tests.cpu.native_stacks import LAYERS, SHAPES, Name, SmallStack, draw_weights, list_products

COUNTS = [5, 1, 9, 1]
LAST = [4, 5, 14, 15]  # each row's last token
RANK = 4


def draw_adapters(shape: str, seed: int = 7) -> dict[Name, tuple[Tensor, Tensor]]:
    """A [RANK, columns] and B [rows, RANK] for every product."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator) * 0.15

    sizes = list_products(SHAPES[shape]).items()
    return {name: (normal(RANK, columns), normal(rows, RANK)) for name, (rows, columns) in sizes}


def apply_adapters(pairs: dict[Name, tuple[Tensor, Tensor]], calls: Counter[Name]) -> PythonAdapters:
    def add(at: HookedProduct) -> None:
        name = (at.product, at.layer, at.expert)
        calls[name] += 1
        a, b = pairs[name]
        assert at.x.shape[1] == a.shape[1] and at.out.shape == (len(at.x), len(b))
        at.out.add_(at.x @ a.t() @ b.t())

    return PythonAdapters(add)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES)
def test_adapters_beside_every_product_equal_merged_weights(shape: str, isa: str) -> None:
    native = open_or_skip(isa)
    weights, pairs, calls = draw_weights(SHAPES[shape], 3), draw_adapters(shape), Counter[Name]()
    plain = SmallStack(native, SHAPES[shape], weights)
    merged = SmallStack(native, SHAPES[shape], {n: w + pairs[n][1] @ pairs[n][0] for n, w in weights.items()})
    for wanted in (None, LAST):
        got = plain.run(COUNTS, wanted, apply_adapters(pairs, calls))
        want = merged.run(COUNTS, wanted)
        assert (got - want).abs().max() <= 2e-5 * want.abs().max()
        assert (plain.run(COUNTS, wanted) - want).abs().max() > 0.1 * want.abs().max()  # they do something
    routed = {name for name in pairs if name[2] >= 0}
    assert all(calls[name] == 2 for name in pairs.keys() - routed)  # once a step
    assert calls.keys() - routed == pairs.keys() - routed


@pytest.mark.parametrize("shape", ["dense", "shared"])
def test_an_adapter_knows_the_token_of_each_row(shape: str) -> None:
    """Rows of one step may have different adapters; also where the last layer computes some tokens only."""
    native = open_or_skip("portable")
    weights, pairs = draw_weights(SHAPES[shape], 3), draw_adapters(shape)
    stack = SmallStack(native, SHAPES[shape], weights)
    adapted = torch.tensor([False] * 6 + [True] * 9 + [False])  # the third row

    def add(at: HookedProduct) -> None:
        if at.product == "head":
            chosen = torch.tensor([False, False, True, False])  # the head's rows are the wanted tokens
        else:
            chosen = adapted[torch.arange(len(at.x)) if at.tokens is None else at.tokens]
        a, b = pairs[at.product, at.layer, at.expert]
        at.out.add_((at.x @ a.t() @ b.t()) * chosen.unsqueeze(1))

    got = stack.run(COUNTS, LAST, PythonAdapters(add))
    plain, all_adapted = stack.run(COUNTS, LAST), stack.run(COUNTS, LAST, apply_adapters(pairs, Counter()))
    assert torch.equal(got[[0, 1, 3]], plain[[0, 1, 3]])
    assert (got[2] - all_adapted[2]).abs().max() <= 2e-5 * all_adapted[2].abs().max()
    assert (got[2] - plain[2]).abs().max() > 0.1 * plain[2].abs().max()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("shape", "form"), [
    ("dense", "F32"), ("dense", "Q8_0"), ("no-gate", "F32"), ("after-norms", "F32"), ("parallel", "Q8_0"),
    ("mixture", "F32"), ("shared", "Q8_0"), ("weighted", "F32"),
])  # fmt: skip
def test_a_reduction_that_doubles_equals_doubled_weights(shape: str, form: str, isa: str) -> None:
    """To the bit, because a power of two changes no rounding: a row that another thread still wrote would differ."""
    native = open_or_skip(isa)
    made, weights, stages = SHAPES[shape], draw_weights(SHAPES[shape], 5), list[int]()

    def double(rows: Tensor, stage: int) -> None:
        stages.append(stage)
        threads.add(threading.get_ident())
        rows.mul_(2.0)

    threads: set[int] = set()
    names = ("out", "down", "shared_down")
    nothing = PythonReduction(lambda rows, stage: None)
    doubled = {n: 2 * w if n[0] in names else w for n, w in weights.items()}
    want = SmallStack(native, made, doubled, form, nothing)
    stack = SmallStack(native, made, weights, form, PythonReduction(double))
    for wanted in (None, LAST):
        assert torch.equal(stack.run(COUNTS, wanted), want.run(COUNTS, wanted))
    assert stages == 2 * list(range(2 * LAYERS))  # once for each block, in order, in every step
    assert threads == {threading.get_ident()}  # the one that runs the step


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "biases"])  # a bias is of one rank only
def test_two_ranks_that_sum_equal_one(shape: str, isa: str) -> None:
    """Each holds half of the heads' and the inner width's columns; the reduction adds the other's share."""
    native = open_or_skip(isa)
    weights = draw_weights(SHAPES[shape], 6)
    whole = SmallStack(native, SHAPES[shape], weights).run(COUNTS)
    shares: dict[int, Tensor] = {}

    def half(rank: int) -> dict[Name, Tensor]:
        halves = dict(weights)
        for name, weight in weights.items():
            if name[0] in ("out", "down", "shared_down"):
                mine = weight.clone()
                columns = mine.shape[1] // 2
                mine[:, (1 - rank) * columns : (2 - rank) * columns] = 0
                halves[name] = mine
        return halves

    ready, barrier, outs = threading.Lock(), threading.Barrier(2, timeout=60), [torch.empty(0)] * 2

    def rank_main(rank: int) -> None:
        def reduce(rows: Tensor, stage: int) -> None:
            with ready:
                shares[rank] = rows.clone()
            barrier.wait()
            rows.copy_(shares[0] + shares[1])
            barrier.wait()

        # Ranks run at once, so each needs threads of its own.
        mine = type(native)(native.library, isa, 2)
        outs[rank] = SmallStack(mine, SHAPES[shape], half(rank), reduction=PythonReduction(reduce)).run(COUNTS)

    ranks = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert torch.equal(outs[0], outs[1])
    assert (outs[0] - whole).abs().max() <= 2e-5 * whole.abs().max()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", ["dense", "biases", "after-norms", "parallel", "mixture"])
def test_hooks_that_do_nothing_change_no_bit(shape: str, isa: str) -> None:
    native = open_or_skip(isa)
    weights = draw_weights(SHAPES[shape], 8)
    plain = SmallStack(native, SHAPES[shape], weights, "Q8_0").run(COUNTS, LAST)
    hooked = SmallStack(native, SHAPES[shape], weights, "Q8_0")
    assert torch.equal(hooked.run(COUNTS, LAST, PythonAdapters(lambda at: None)), plain)
    if not SHAPES[shape].mixture:  # experts' shares are summed by themselves for a reduction: other roundings
        nothing = PythonReduction(lambda rows, stage: None)
        assert torch.equal(SmallStack(native, SHAPES[shape], weights, "Q8_0", nothing).run(COUNTS, LAST), plain)


@pytest.mark.parametrize("shape", ["dense", "shared"])
def test_a_hook_that_fails_ends_the_step_and_no_more(shape: str) -> None:
    native = open_or_skip("portable")
    weights = draw_weights(SHAPES[shape], 9)
    state = {"stage": 3}

    def fail_at(rows: Tensor, stage: int) -> None:
        if stage == state["stage"]:
            raise TimeoutError(f"rank 1 did not answer in stage {stage}")

    stack = SmallStack(native, SHAPES[shape], weights, reduction=PythonReduction(fail_at))
    with pytest.raises(TimeoutError, match="stage 3"):
        stack.run(COUNTS)
    state["stage"] = -1
    nothing = PythonReduction(lambda rows, stage: None)
    assert torch.equal(stack.run(COUNTS), SmallStack(native, SHAPES[shape], weights, reduction=nothing).run(COUNTS))

    def refuse(at: HookedProduct) -> None:
        if at.product == refused:
            raise ValueError(at.product)

    for refused in ("value", "head", "down"):
        with pytest.raises(ValueError, match=refused):
            stack.run(COUNTS, LAST, PythonAdapters(refuse))


def test_a_hook_in_c_gets_its_context_and_may_refuse() -> None:
    """A hook is two addresses; the function here adds to a counter where its context points."""
    native = open_or_skip("portable")
    counted = (c_int64 * 2)(0, 0)

    @ReductionCall
    def count(context: int, rows: int, num_rows: int, width: int, stage: int) -> int:
        there = (c_int64 * 2).from_address(context)
        there[0] += num_rows
        (c_float * width).from_address(rows)[0] += 1.0
        return int(there[1])

    address = cast(count, c_void_p).value
    assert address is not None
    hook = Hook(address, cast(counted, c_void_p).value)
    weights = draw_weights(SHAPES["dense"], 2)
    stack = SmallStack(native, SHAPES["dense"], weights, reduction=hook)
    changed = stack.run(COUNTS, LAST)
    assert counted[0] == 2 * (LAYERS - 1) * sum(COUNTS) + 2 * len(LAST)  # the last layer works for the wanted only
    assert not torch.equal(changed, SmallStack(native, SHAPES["dense"], weights).run(COUNTS, LAST))
    counted[1] = 1
    with pytest.raises(HookFailed, match="ended the step"):
        stack.run(COUNTS, LAST)
