"""The native ops of recurrent layers against the reference in float64, over random shapes and steps that go on from
each other: rows of one token beside rows that catch up."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.native.library import Native
from quire.kernels.native.recurrent import NativeRecurrent
from quire.kernels.recurrent_types import ConvShape, ConvWeights, DeltaWeights, MambaWeights, RecurrentShape
from quire.kernels.reference import recurrent as reference

SEED = int(os.environ.get("TEST_SEED", "6"))
STEPS = [[1] * 5, [1, 40, 1, 3, 1], [1] * 5, [7, 1, 1, 1, 33], [2, 3, 4, 5, 6]]  # tokens of each row
SHAPES = [RecurrentShape(1, 1, 8, 8, 2), RecurrentShape(2, 6, 13, 21, 4), RecurrentShape(3, 3, 64, 40, 3),
          RecurrentShape(1, 20, 70, 33, 4)]  # fmt: skip


@pytest.fixture(autouse=True)
def _seed() -> None:
    print(f"{SEED=}")
    torch.manual_seed(SEED)


@pytest.fixture
def ops(native: Native) -> NativeRecurrent:
    return NativeRecurrent(native)


@dataclass(frozen=True)
class Kind:
    """`inputs`: columns of each input."""

    name: str
    inputs: Callable[[Any], tuple[int, ...]]
    weights: Callable[[Any], Any]


def far(bias: Tensor) -> Tensor:
    """One where softplus is as good as straight."""
    bias[-1] += 25.0
    return bias


def delta_weights(shape: RecurrentShape, by_channel: bool = False) -> DeltaWeights:
    heads, bias = shape.num_heads, shape.keys if by_channel else shape.num_heads
    conv = 0.5 * torch.randn(shape.channels, 1, shape.conv_len)
    return DeltaWeights(conv, torch.randn(heads) - 1, far(torch.randn(bias)), torch.randn(shape.value_dim) + 1, 1e-5)


def mamba_weights(shape: RecurrentShape, **changes: Any) -> MambaWeights:
    heads, conv = shape.num_heads, 0.5 * torch.randn(shape.channels, 1, shape.conv_len)
    weights = MambaWeights(conv, torch.randn(shape.channels), torch.randn(heads) - 1, far(torch.randn(heads)),
                           torch.randn(heads), torch.randn(shape.values) + 1, 1e-5, shape.num_groups, 0.2,
                           2.0)  # fmt: skip
    return replace(weights, **changes)


def mamba(name: str, **changes: Any) -> Kind:
    return Kind(name, lambda s: (s.values + s.channels + s.num_heads,), lambda shape: mamba_weights(shape, **changes))


KINDS = [
    Kind("gated_delta_net", lambda s: (s.channels + s.values + 2 * s.num_heads,), delta_weights),
    Kind("channel_delta_net", lambda s: (s.channels + s.num_heads, s.keys, s.values),
         lambda shape: delta_weights(shape, by_channel=True)),
    mamba("mamba2"), mamba("mamba2", norm=None), mamba("mamba2", gate_first=False, conv_bias=None),
]  # fmt: skip


def shapes_for(kind: Kind) -> list[RecurrentShape]:
    if kind.name == "channel_delta_net":
        return [replace(shape, num_groups=shape.num_heads) for shape in SHAPES]
    return [*SHAPES, replace(SHAPES[0], beta_top=2.0)] if kind.name == "gated_delta_net" else SHAPES


def doubled(weights: Any) -> Any:
    tensors = {f.name: getattr(weights, f.name) for f in fields(weights)}
    return replace(weights, **{name: value.double() for name, value in tensors.items() if isinstance(value, Tensor)})


def close(got: Tensor, want: Tensor, what: str) -> None:
    assert not got.isnan().any(), what
    assert (got - want).norm() <= 2e-5 * want.norm(), f"{what}: off by {(got - want).norm() / want.norm():.1e}"


def follow(ops: NativeRecurrent, name: str, shape: Any, weights: Any, widths: tuple[int, ...]) -> None:
    """Steps from each other's states; slots lie anywhere, among others that nobody may touch."""
    num_rows = len(STEPS[0])
    slots = torch.randperm(num_rows + 3)[:num_rows]
    state = torch.randn(num_rows + 3, shape.slot_elements + 5)[:, : shape.slot_elements]
    state[slots] = 0.0
    before, exact, ends = state.clone(), state.double(), [0] * num_rows
    for counts in STEPS:
        starts, ends = ends, [end + count for end, count in zip(ends, counts, strict=True)]
        positions = torch.cat([torch.arange(*span) for span in zip(starts, ends, strict=True)])
        inputs = [torch.randn(sum(counts), width + 3)[:, :width] for width in widths]
        got = getattr(ops, name)(*inputs, weights, shape, state, ops.plan_recurrent(slots, positions, counts))
        plan = reference.plan_recurrent(slots, positions, counts)
        want = getattr(reference, name)(*(x.double() for x in inputs), doubled(weights), shape, exact, plan)
        close(got, want, f"{name}, {counts}")
    close(state[slots], exact[slots], f"{name}: what is left behind")
    others = [slot for slot in range(len(state)) if slot not in slots.tolist()]
    assert torch.equal(state[others], before[others])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_rows_of_one_token_and_rows_that_catch_up(ops: NativeRecurrent, kind: Kind) -> None:
    for shape in shapes_for(kind):
        follow(ops, kind.name, shape, kind.weights(shape), kind.inputs(shape))


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_that_is_a_convolution(ops: NativeRecurrent, has_bias: bool) -> None:
    for shape in (ConvShape(1, 2), ConvShape(37, 3), ConvShape(700, 4)):
        weights = ConvWeights(torch.randn(shape.channels, 1, shape.conv_len), torch.randn(shape.channels))
        follow(ops, "short_conv", shape, weights if has_bias else replace(weights, bias=None), (3 * shape.channels,))


@pytest.mark.parametrize("kind", KINDS[:3], ids=lambda kind: kind.name)
def test_company_does_not_change_a_bit(ops: NativeRecurrent, kind: Kind) -> None:
    shape = shapes_for(kind)[1]
    weights, inputs = kind.weights(shape), [torch.randn(9, width) for width in kind.inputs(shape)]
    state, slots, positions = torch.randn(9, shape.slot_elements), torch.randperm(9), torch.arange(5, 14)
    together = state.clone()
    op, counts, first = getattr(ops, kind.name), (1, 4, 1, 1, 2), 0
    out = op(*inputs, weights, shape, together, ops.plan_recurrent(slots[:5], positions, list(counts)))
    for row, count in enumerate(counts):
        for token in range(first, first + count):  # a prompt goes as its tokens do, one by one
            here = slice(token, token + 1)
            plan = ops.plan_recurrent(slots[row : row + 1], positions[here], [1])
            assert torch.equal(op(*(x[here] for x in inputs), weights, shape, state, plan)[0], out[token])
        first += count
    assert torch.equal(state, together)


@pytest.mark.parametrize("kind", KINDS[:3], ids=lambda kind: kind.name)
def test_what_the_library_does_not_take_goes_to_the_reference(ops: NativeRecurrent, kind: Kind) -> None:
    """Other types, and weights that are not dense."""
    shape = shapes_for(kind)[1]
    inputs = [torch.randn(2, width) for width in kind.inputs(shape)]
    weights, state = kind.weights(shape), torch.randn(2, shape.slot_elements)
    strided = replace(weights, conv=weights.conv.transpose(0, 2).contiguous().transpose(0, 2))
    for given, kept in ((inputs, strided), ([x.double() for x in inputs], doubled(weights))):
        ours, theirs = state.to(given[0].dtype, copy=True), state.to(given[0].dtype, copy=True)
        plan = ops.plan_recurrent(torch.arange(2), torch.arange(3, 5), [1, 1])
        slow = reference.plan_recurrent(plan.slots, plan.positions, plan.counts)
        want = getattr(reference, kind.name)(*given, kept, shape, theirs, slow)
        assert torch.equal(getattr(ops, kind.name)(*given, kept, shape, ours, plan), want) and torch.equal(ours, theirs)


def test_a_plan_of_other_tokens_is_refused(ops: NativeRecurrent) -> None:
    plan = ops.plan_recurrent(torch.arange(2), torch.arange(2), [1, 1])
    for kind in KINDS[:3]:
        shape = shapes_for(kind)[1]
        with pytest.raises(AssertionError):
            inputs = [torch.randn(3, width) for width in kind.inputs(shape)]
            getattr(ops, kind.name)(*inputs, kind.weights(shape), shape, torch.randn(2, shape.slot_elements), plan)


def test_a_nan_stays_with_its_row(ops: NativeRecurrent) -> None:
    for kind in KINDS[:3]:
        shape = shapes_for(kind)[1]
        inputs = [torch.randn(3, width) for width in kind.inputs(shape)]
        inputs[0][1] = torch.nan
        state = torch.randn(3, shape.slot_elements)
        plan = ops.plan_recurrent(torch.arange(3), torch.arange(3), [1, 1, 1])
        out = getattr(ops, kind.name)(*inputs, kind.weights(shape), shape, state, plan)
        assert [rows.isfinite().all().item() for rows in (*out, *state)] == [True, False, True] * 2
