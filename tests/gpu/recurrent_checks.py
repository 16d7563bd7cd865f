"""Recurrent layers' Triton kernels against the exact recurrence in float64: mixed steps, over and over, from the state
that the steps before left. Run as `kernel_checks` are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from quire.kernels.recurrent_types import ConvShape, ConvWeights, DeltaWeights, MambaWeights, RecurrentShape
from quire.kernels.reference import recurrent as reference
from quire.kernels.validation.recurrent_trials import of_one_tensor
from tests.gpu.where import Where, close, need_hopper

# A chunk's products are rounded to the type they are computed in before the state sums them up.
BOUNDS = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
STEPS = [[40, 1, 1, 7], [1, 1, 1, 1], [1, 90, 3, 1]]  # tokens per row
STEPS_SMALL = [[19, *[1] * 7], [1, 70, *[1] * 6]]  # eight rows: enough for small blocks


def weights_of(where: Where, shape: RecurrentShape, dtype: torch.dtype, delta: bool) -> DeltaWeights | MambaWeights:
    heads = shape.num_heads
    conv = where.normal(shape.channels, 1, shape.conv_len, dtype=dtype) * 0.5
    a_log, dt_bias = where.normal(heads) - 1.0, where.normal(heads)
    if delta:
        return DeltaWeights(conv, a_log, dt_bias, where.normal(shape.value_dim, dtype=dtype) + 1.0, 1e-6)
    return MambaWeights(conv, where.normal(shape.channels, dtype=dtype), a_log, dt_bias, where.normal(heads),
                        where.normal(shape.values, dtype=dtype) + 1.0, 1e-5, shape.num_groups, 0.01, 5.0)  # fmt: skip


def doubled(weights: Any) -> Any:
    """The same weights in float64, for the reference."""
    tensors = {f.name: getattr(weights, f.name) for f in fields(weights)}
    return replace(weights, **{name: value.double() for name, value in tensors.items() if isinstance(value, Tensor)})


def check_recurrent(where: Where, op: Callable[..., Tensor], shapes: list[RecurrentShape], steps: list[list[int]],
                    delta: bool, dtypes: tuple[torch.dtype, ...], pad: int = 5, **changes: Any) -> None:  # fmt: skip
    """`pad`: columns of x that nobody reads, behind those that count; `changes`: of the weights."""
    plain = reference.gated_delta_net if delta else reference.mamba2
    for dtype, shape in product(dtypes, shapes):
        weights = replace(weights_of(where, shape, dtype, delta), **changes)
        width = plain_width(shape, delta)
        name = f"{'delta' if delta else 'mamba'} {shape.num_heads}/{shape.num_groups} heads"
        follow(where, op, plain, weights, shape, width, steps, dtype, name, pad)


def plain_width(shape: RecurrentShape, delta: bool) -> int:
    return shape.channels + shape.values + (2 if delta else 1) * shape.num_heads


def follow(where: Where, op: Callable[..., Tensor], plain: Callable[..., Tensor], weights: Any, shape: RecurrentShape,
           width: int, steps: list[list[int]], dtype: torch.dtype, name: str, pad: int,
           alter: Callable[[Tensor], None] | None = None) -> None:  # fmt: skip
    """One layer step after step, beside what is `plain`. `width`: of x, which is drawn, then altered."""
    from quire.kernels.triton.recurrent import recurrent

    num_rows = len(steps[0])
    slots = torch.randperm(num_rows + 2, device=where.device)[:num_rows]
    state = torch.zeros(num_rows + 2, shape.slot_elements, device=where.device)
    exact = state.clone().double()
    lens = [0] * num_rows
    for counts in steps:
        ends = [n + c for n, c in zip(lens, counts, strict=True)]
        spans = [torch.arange(n, end, device=where.device) for n, end in zip(lens, ends, strict=True)]
        positions = torch.cat(spans)
        x = where.normal(sum(counts), width + pad, dtype=dtype)[:, :width]
        if alter is not None:
            alter(x)
        where.settle()
        where.poison()
        out = op(x, weights, shape, state, recurrent.plan_recurrent(slots, positions, counts))
        plan = reference.plan_recurrent(slots, positions, counts)
        expected = plain(x.double(), doubled(weights), shape, exact, plan)
        close(out, expected, dtype, f"{name}, {counts}", BOUNDS[dtype])
        close(shape.rings(state), shape.rings(exact), dtype, f"{name}, {counts}: rings", 1e-6)
        close(shape.matrices(state), shape.matrices(exact), dtype, f"{name}, {counts}: state", BOUNDS[dtype])
        lens = ends


def check_channel_delta_net(where: Where) -> None:
    from quire.kernels.triton.recurrent import channel_delta as recurrent_channel

    large = [RecurrentShape(32, 32, 128, 128, 4), RecurrentShape(4, 4, 64, 64, 4), RecurrentShape(3, 3, 20, 12, 3)]
    shapes = large if where.large else [RecurrentShape(2, 2, 20, 40, 4)]
    spreads = [(dtype, spread) for dtype in where.dtypes for spread in SPREADS]
    for (dtype, spread), shape in product(spreads if where.large else spreads[::3], shapes):
        steps = STEPS if where.large else STEPS_SMALL
        follow_channels(where, recurrent_channel.channel_delta_net, shape, dtype, spread, steps, pad=5)


SPREADS = (6.0, 1.0)  # of channels' decays: some keep nothing of the token before, beside others that keep nearly all


def channel_weights(where: Where, shape: RecurrentShape, dtype: torch.dtype, spread: float = 1.0) -> DeltaWeights:
    weights = weights_of(where, shape, dtype, True)
    a_log = weights.a_log + (0.0 if spread == 1.0 else 3.0)
    return replace(weights, dt_bias=where.normal(shape.keys) * spread, a_log=a_log)


def channel_width(shape: RecurrentShape) -> int:
    return shape.channels + shape.num_heads + shape.keys + shape.values


def follow_channels(where: Where, op: Callable[..., Tensor], shape: RecurrentShape, dtype: torch.dtype, spread: float,
                    steps: list[list[int]], pad: int) -> None:  # fmt: skip
    op, plain = of_one_tensor(op), of_one_tensor(reference.channel_delta_net)
    name = f"channels' delta, {shape.num_heads} heads, decays spread by {spread}"
    weights = channel_weights(where, shape, dtype, spread)
    follow(where, op, plain, weights, shape, channel_width(shape), steps, dtype, name, pad)


def check_gated_delta_net(where: Where) -> None:
    from quire.kernels.triton.recurrent import recurrent

    large = [RecurrentShape(16, 32, 128, 128, 4), RecurrentShape(2, 4, 64, 128, 4)]
    large += [RecurrentShape(2, 4, 8, 12, 4), RecurrentShape(1, 2, 128, 32, 4), RecurrentShape(2, 2, 32, 64, 4)]
    large += [RecurrentShape(30, 30, 96, 192, 4, beta_top=2.0)]
    shapes = large if where.large else [RecurrentShape(1, 2, 16, 40, 4)]
    steps = STEPS if where.large else STEPS_SMALL
    check_recurrent(where, recurrent.gated_delta_net, shapes, steps, True, where.dtypes)
    if not where.large:
        turning = RecurrentShape(1, 1, 8, 8, 2, beta_top=2.0)
        check_recurrent(where, recurrent.gated_delta_net, [turning], [[35, 1]], True, where.dtypes[:1])


def check_mamba2(where: Where) -> None:
    from quire.kernels.triton.recurrent import recurrent

    large = [RecurrentShape(8, 128, 128, 64, 4), RecurrentShape(1, 24, 256, 64, 4), RecurrentShape(2, 4, 24, 16, 4)]
    shapes = large if where.large else [RecurrentShape(1, 2, 24, 16, 3)]
    check_recurrent(where, recurrent.mamba2, shapes, STEPS if where.large else STEPS_SMALL, False, where.dtypes)
    steps = [[130, 1, 64], [1, 1, 1]] if where.large else [[3, 1]]
    for changes in ({"norm": None}, {"gate_first": False}):
        check_recurrent(where, recurrent.mamba2, shapes[:2], steps, False, where.dtypes[:1], **changes)


def check_short_conv(where: Where) -> None:
    """Steps over and over; then one prompt again token by token, which must not change a bit."""
    from quire.kernels.triton.recurrent import recurrent
    from quire.kernels.triton.recurrent import short_conv as recurrent_short

    shapes = [ConvShape(2048, 3), ConvShape(1000, 5), ConvShape(64, 2)] if where.large else [ConvShape(40, 3)]
    steps = STEPS if where.large else STEPS_SMALL
    for dtype, shape, has_bias in product(where.dtypes, shapes, (False, True)):
        name, width = f"convolution of {shape.channels} in {dtype}", 3 * shape.channels
        bias = where.normal(shape.channels, dtype=dtype) if has_bias else None
        weights = ConvWeights(where.normal(shape.channels, 1, shape.conv_len, dtype=dtype), bias)
        num_rows = len(steps[0])
        slots = torch.randperm(num_rows + 2, device=where.device)[:num_rows]
        state = torch.zeros(num_rows + 2, shape.slot_elements, device=where.device)
        exact = state.double()
        lens = [0] * num_rows
        for counts in steps:
            ends = [n + c for n, c in zip(lens, counts, strict=True)]
            spans = [torch.arange(n, end, device=where.device) for n, end in zip(lens, ends, strict=True)]
            positions = torch.cat(spans)
            x = where.normal(sum(counts), width + 5, dtype=dtype)[:, :width]
            before = state.clone()
            where.settle()
            where.poison()
            out = recurrent_short.short_conv(
                x, weights, shape, state, recurrent.plan_recurrent(slots, positions, counts)
            )
            plan = reference.plan_recurrent(slots, positions, counts)
            close(
                out, reference.short_conv(x.double(), doubled(weights), shape, exact, plan), dtype, f"{name}, {counts}"
            )
            close(state, exact, dtype, f"{name}, {counts}: rings", 1e-6)
            lens = ends
        first = sum(counts[: counts.index(max(counts))])
        here = slots[counts.index(max(counts))][None]
        where.settle()
        for token in range(first, first + max(counts)):
            plan = recurrent.plan_recurrent(here, positions[token : token + 1], [1])
            alone = recurrent_short.short_conv(x[token : token + 1], weights, shape, before, plan)
            assert torch.equal(alone[0], out[token]), f"{name}: token {token - first} alone"
        assert torch.equal(before[here], state[here]), f"{name}: its ring"


def check_prepared_chunks(where: Where) -> None:
    """What chunks work out alone, of keys that resemble each other."""
    from quire.kernels.triton.recurrent.conv import ConvolvedChunks
    from quire.kernels.triton.recurrent.scan import chunk_tokens, prepare_chunks

    shape = RecurrentShape(2, 4, 128, 128, 4) if where.large else RecurrentShape(1, 2, 16, 16, 4)
    heads, groups = shape.num_heads, shape.num_groups
    for dtype, top in product(where.dtypes, (1.0, 2.0) if where.large else (2.0,)):
        chunk = chunk_tokens(shape, dtype)
        keys = where.normal(3, 2 * groups, chunk, shape.key_dim) + 0.5 * where.normal(3, 2 * groups, 1, shape.key_dim)
        keys = torch.nn.functional.normalize(keys, dim=-1).to(dtype)
        values = where.normal(3, heads, chunk, shape.value_dim, dtype=dtype)
        total = -where.normal(3, heads, chunk).abs().mul(0.1).cumsum(-1)
        gates = torch.stack((total, top * where.normal(3, heads, chunk).sigmoid()), 2)
        written = values.clone()
        where.settle()
        w, scores = prepare_chunks(ConvolvedChunks(keys, written, gates), shape)
        q, k = (part.double().repeat_interleave(heads // groups, 1) for part in keys.split(groups, 1))
        total, beta = gates.double()[..., None].unbind(2)  # [chunks, heads, chunk, 1]
        between = (total - total.mT).exp().tril()
        lower = (k @ k.mT * between * beta).tril(-1)
        t = torch.linalg.inv(lower + torch.eye(chunk, dtype=torch.float64, device=where.device))
        close(scores, q @ k.mT * between, dtype, "scores of a chunk")
        close(written, t @ (values.double() * beta), dtype, "what a chunk writes", BOUNDS[dtype])
        close(w, t @ (k * beta * total.exp()), dtype, "how a state changes that", BOUNDS[dtype])


# ---------------------------------------------------------------------------------------------------------------------
# Hopper's kernels for catch-ups. They are Gluon, which the interpreter does not run, and have nothing for float32.

WALK_SHAPES = [RecurrentShape(16, 32, 128, 128, 4), RecurrentShape(4, 12, 128, 128, 3)]  # heads by two, and by one
MAMBA_SHAPES = [RecurrentShape(8, 128, 128, 64, 4), RecurrentShape(1, 24, 128, 64, 3)]
WALK_STEPS = [[64, 1, 2, 300, 63, 1], [1, 65, 1, 128, 1, 7], [1, 1, 1, 1, 1, 1], [130, 1, 64, 1, 2, 1]]


def walk_dtypes(where: Where) -> tuple[torch.dtype, ...]:
    need_hopper(where)
    return tuple(dtype for dtype in where.dtypes if dtype != torch.float32)


def walk_inputs(where: Where, shape: RecurrentShape, dtype: torch.dtype, counts: list[int], width: int
                ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """x, positions and a state, for rows that go on from position 5."""
    x = where.normal(sum(counts), width, dtype=dtype)
    positions = torch.cat([torch.arange(5, 5 + count, device=where.device) for count in counts])
    return x, positions, where.normal(len(counts), shape.slot_elements) * 0.1


def check_ready_chunks(where: Where) -> None:
    """What the walk is given of each chunk, T of keys that resemble each other included."""
    for dtype in walk_dtypes(where):
        for shape in WALK_SHAPES:
            _check_chunks(where, shape, dtype, [130, 64, 70])


def _check_chunks(where: Where, shape: RecurrentShape, dtype: torch.dtype, counts: list[int]) -> None:
    from quire.kernels.triton.recurrent.hopper import gated_delta as recurrent_walk

    heads, groups = shape.num_heads, shape.num_groups
    weights = weights_of(where, shape, dtype, True)
    x, positions, state = walk_inputs(where, shape, dtype, counts, plain_width(shape, True))
    x[:, shape.keys : 2 * shape.keys] += 3.0 * where.normal(shape.keys, dtype=dtype)
    slots = torch.randperm(len(counts), device=where.device)
    firsts = [sum(counts[:row]) for row in range(len(counts))]
    tiles = [(row, firsts[row], start, count) for row, count in enumerate(counts) for start in range(0, count, 64)]
    listed = torch.tensor(tiles, dtype=torch.int32, device=where.device)
    where.settle()
    where.poison()
    found = recurrent_walk.prepare_chunks(x, weights, shape, state, slots, positions, listed)
    sizes = (shape.channels, shape.values, heads, heads)
    mixed, _gate, beta, a = x.double().split(sizes, dim=1)
    exact, plan = doubled(weights), reference.plan_recurrent(slots, positions, counts)
    mixed = torch.nn.functional.silu(reference.causal_conv(mixed, exact.conv, None, shape, state.double(), plan))
    keys = mixed[:, : 2 * shape.keys].unflatten(1, (2 * groups, -1))  # queries first
    keys = keys * (keys.square().sum(-1, keepdim=True) + reference.L2_EPS).rsqrt()
    keys[:, :groups] *= shape.key_dim**-0.5
    values = mixed[:, 2 * shape.keys :].unflatten(1, (heads, -1))
    decay = -exact.a_log.exp() * torch.nn.functional.softplus(a + exact.dt_bias)  # [tokens, heads]
    for tile, (_row, first, start, count) in enumerate(tiles):
        size = min(count - start, 64)
        span = slice(first + start, first + start + size)
        name = f"{heads}/{groups} heads, {size} tokens"
        close(found.keys[tile, :, :size], keys[span].transpose(0, 1), dtype, f"{name}: keys")
        close(found.values[tile, :, :size], values[span].transpose(0, 1), dtype, f"{name}: values")
        total = decay[span].t().cumsum(1)  # [heads, tokens]
        gates = torch.stack((total.exp(), (total[:, -1:] - total).exp()), 1)
        close(found.gates[tile, :, :2, :size], gates, torch.float32, f"{name}: gates")
        q, k = (
            part.double().repeat_interleave(heads // groups, 0) for part in found.keys[tile, :, :size].split(groups)
        )
        between = (total[:, :, None] - total[:, None]).tril().exp().tril()
        weight = beta[span].sigmoid().t()
        lower = (k @ k.mT * between * weight[:, :, None]).tril(-1)
        t = torch.linalg.inv(lower + torch.eye(size, dtype=torch.float64, device=where.device)) * weight[:, None]
        close(found.scores[tile, :, :size, :size], q @ k.mT * between, dtype, f"{name}: scores")
        close(found.t[tile, :, :size, :size], t, dtype, f"{name}: inverse")


@contextmanager
def forced_halves(halves: int) -> Iterator[None]:
    """Of a head to a program: either is right for any step."""
    from quire.kernels.triton.recurrent.hopper import channel_delta as channel_walk
    from quire.kernels.triton.recurrent.hopper import gated_delta as recurrent_walk

    chosen = recurrent_walk.halves_per_program
    for module in (recurrent_walk, channel_walk):
        module.halves_per_program = lambda *_: halves
    try:
        yield
    finally:
        for module in (recurrent_walk, channel_walk):
            module.halves_per_program = chosen


def check_delta_walk(where: Where) -> None:
    """x whose rows the copy engine can't read is done by the row for all cards."""
    dtypes = walk_dtypes(where)
    from quire.kernels.triton.recurrent.hopper import gated_delta as recurrent_walk

    for pad, shapes, supported in ((0, WALK_SHAPES, True), (8, WALK_SHAPES[:1], True), (5, WALK_SHAPES[:1], False)):

        def op(x: Tensor, weights: DeltaWeights, shape: RecurrentShape, state: Tensor, plan: Any,
               supported: bool = supported) -> Tensor:  # fmt: skip
            assert recurrent_walk.supports(x, shape, state) == supported
            return recurrent_walk.gated_delta_net(x, weights, shape, state, plan)

        for halves in (1, 2) if supported else (2,):
            with forced_halves(halves):
                check_recurrent(where, op, shapes, WALK_STEPS if supported else WALK_STEPS[:1], True, dtypes, pad)


def check_delta_walk_keeps_rows_apart(where: Where) -> None:
    """A row's last chunk is read together with what lies behind it, which is another row's. Programs that share a head
    tell each other a NaN as they do any sum."""
    need_hopper(where)
    from quire.kernels.triton.recurrent.hopper import gated_delta as recurrent_walk

    for halves in (1, 2):
        with forced_halves(halves):
            _check_rows_apart(where, recurrent_walk.gated_delta_net, WALK_SHAPES[0], delta_layer)


# A layer to check: its weights, and how wide its x is.
Layer = Callable[[Where, RecurrentShape, torch.dtype], tuple[Any, int]]


def delta_layer(where: Where, shape: RecurrentShape, dtype: torch.dtype) -> tuple[Any, int]:
    return weights_of(where, shape, dtype, True), plain_width(shape, True)


def mamba_layer(where: Where, shape: RecurrentShape, dtype: torch.dtype) -> tuple[Any, int]:
    return weights_of(where, shape, dtype, False), plain_width(shape, False)


def channel_layer(where: Where, shape: RecurrentShape, dtype: torch.dtype) -> tuple[Any, int]:
    return channel_weights(where, shape, dtype), channel_width(shape)


def _check_rows_apart(where: Where, op: Callable[..., Tensor], shape: RecurrentShape, layer: Layer) -> None:
    dtypes = walk_dtypes(where)
    from quire.kernels.triton.recurrent import recurrent

    dtype, counts = dtypes[-1], [70, 64, 65]
    weights, width = layer(where, shape, dtype)
    x, positions, state = walk_inputs(where, shape, dtype, counts, width)
    x[70:134] = torch.nan
    plan = recurrent.plan_recurrent(torch.arange(3, device=where.device), positions, counts)
    where.settle()
    out = op(x, weights, shape, state, plan)
    finite = [rows.isfinite().all().item() for rows in (*out.split(counts), *state)]
    assert finite == [True, False, True] * 2, finite


def check_delta_walk_repeats(where: Where) -> None:
    """The same again and again, to the bit: groups of warps that ran ahead of each other would show, and programs that
    share a head and did not wait for each other."""
    need_hopper(where)
    from quire.kernels.triton.recurrent.hopper import gated_delta as recurrent_walk

    for halves in (1, 2):
        with forced_halves(halves):
            _check_repeats(where, recurrent_walk.gated_delta_net, WALK_SHAPES[0], delta_layer)


def _check_repeats(where: Where, op: Callable[..., Tensor], shape: RecurrentShape, layer: Layer) -> None:
    dtypes = walk_dtypes(where)
    from quire.kernels.triton.recurrent import recurrent

    dtype, counts = dtypes[-1], [1000, 1, 1024, 65, 700]
    weights, width = layer(where, shape, dtype)
    x, positions, state = walk_inputs(where, shape, dtype, counts, width)
    plan = recurrent.plan_recurrent(torch.arange(len(counts), device=where.device), positions, counts)
    where.settle()
    found = []
    for _ in range(20):
        after = state.clone()
        where.poison()
        found.append((op(x, weights, shape, after, plan), after))
    assert all(torch.equal(*pair) for other in found for pair in zip(found[0], other, strict=True))


def check_mamba_walk(where: Where) -> None:
    """x whose rows the copy engine can't read is done by the row for all cards. More items than programs, and fewer."""
    dtypes = walk_dtypes(where)
    from quire.kernels.triton.recurrent.hopper import mamba as mamba_walk

    changes: list[dict[str, Any]] = [{}, {"norm": None}, {"gate_first": False}, {"conv_bias": None}]
    cases = [(0, MAMBA_SHAPES, True, each) for each in changes]
    cases += [(8, MAMBA_SHAPES[:1], True, {}), (5, MAMBA_SHAPES[:1], False, {})]
    for pad, shapes, supported, change in cases:

        def op(x: Tensor, weights: MambaWeights, shape: RecurrentShape, state: Tensor, plan: Any,
               supported: bool = supported) -> Tensor:  # fmt: skip
            assert mamba_walk.supports(x, weights, shape, state) == supported
            return mamba_walk.mamba2(x, weights, shape, state, plan)

        steps = WALK_STEPS if supported and not change else WALK_STEPS[:1]
        check_recurrent(where, op, shapes, steps, False, dtypes, pad, **change)


def check_mamba_walk_keeps_rows_apart(where: Where) -> None:
    need_hopper(where)
    from quire.kernels.triton.recurrent.hopper import mamba as mamba_walk

    _check_rows_apart(where, mamba_walk.mamba2, MAMBA_SHAPES[0], mamba_layer)


def check_mamba_walk_repeats(where: Where) -> None:
    need_hopper(where)
    from quire.kernels.triton.recurrent.hopper import mamba as mamba_walk

    _check_repeats(where, mamba_walk.mamba2, MAMBA_SHAPES[0], mamba_layer)


CHANNEL_SHAPES = [RecurrentShape(32, 32, 128, 128, 4), RecurrentShape(8, 8, 128, 128, 2, beta_top=2.0)]


def check_channel_walk(where: Where) -> None:
    """As `check_delta_walk`."""
    dtypes = walk_dtypes(where)
    from quire.kernels.triton.recurrent.hopper import channel_delta as channel_walk

    for pad, shapes, supported in (
        (0, CHANNEL_SHAPES, True),
        (8, CHANNEL_SHAPES[:1], True),
        (5, CHANNEL_SHAPES[:1], False),
    ):

        def op(x: Tensor, forget: Tensor, gate: Tensor, weights: DeltaWeights, shape: RecurrentShape, state: Tensor,
               plan: Any, supported: bool = supported) -> Tensor:  # fmt: skip
            assert channel_walk.supports(x, forget, gate, shape, state) == supported
            return channel_walk.channel_delta_net(x, forget, gate, weights, shape, state, plan)

        for halves, dtype, shape in product((1, 2) if supported else (2,), dtypes, shapes):
            with forced_halves(halves):
                for spread in SPREADS if supported and not pad else SPREADS[:1]:
                    follow_channels(where, op, shape, dtype, spread, WALK_STEPS if supported else WALK_STEPS[:1], pad)
                if supported and not pad:
                    _check_steady(where, op, shape, dtype)


def _check_steady(where: Where, op: Callable[..., Tensor], shape: RecurrentShape, dtype: torch.dtype) -> None:
    """All tokens decay alike and slowly: what roundings have in common would add up."""
    weights = channel_weights(where, shape, dtype)
    weights = replace(weights, dt_bias=torch.zeros_like(weights.dt_bias), a_log=torch.full_like(weights.a_log, -6.5))

    def alter(x: Tensor) -> None:
        x[:, shape.channels + shape.num_heads :][:, : shape.keys] = -1.25

    follow(where, of_one_tensor(op), of_one_tensor(reference.channel_delta_net), weights, shape, channel_width(shape),
           WALK_STEPS, dtype, "channels that decay alike", 0, alter)  # fmt: skip


def check_channel_walk_keeps_rows_apart(where: Where) -> None:
    need_hopper(where)
    from quire.kernels.triton.recurrent.hopper import channel_delta as channel_walk

    for halves in (1, 2):
        with forced_halves(halves):
            _check_rows_apart(where, of_one_tensor(channel_walk.channel_delta_net), CHANNEL_SHAPES[0], channel_layer)


def check_channel_walk_repeats(where: Where) -> None:
    need_hopper(where)
    from quire.kernels.triton.recurrent.hopper import channel_delta as channel_walk

    for halves in (1, 2):
        with forced_halves(halves):
            _check_repeats(where, of_one_tensor(channel_walk.channel_delta_net), CHANNEL_SHAPES[0], channel_layer)


CHECKS: dict[str, Callable[[Where], None]] = {
    "gated_delta_net": check_gated_delta_net,
    "channel_delta_net": check_channel_delta_net,
    "mamba2": check_mamba2,
    "short_conv": check_short_conv,
    "prepared_chunks": check_prepared_chunks,
    "ready_chunks": check_ready_chunks,
    "delta_walk": check_delta_walk,
    "delta_walk_keeps_rows_apart": check_delta_walk_keeps_rows_apart,
    "delta_walk_repeats": check_delta_walk_repeats,
    "channel_walk": check_channel_walk,
    "channel_walk_keeps_rows_apart": check_channel_walk_keeps_rows_apart,
    "channel_walk_repeats": check_channel_walk_repeats,
    "mamba_walk": check_mamba_walk,
    "mamba_walk_keeps_rows_apart": check_mamba_walk_keeps_rows_apart,
    "mamba_walk_repeats": check_mamba_walk_repeats,
}
