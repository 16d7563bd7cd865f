"""Trials of recurrent layers on their own shape, and of Hopper's chunked scans for delta nets and Mamba2
(`triton/recurrent/hopper`), which enter the ops table if they are right; see `trials` and `hopper_trial`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.kernels.recurrent_types import ConvShape, ConvWeights, DeltaWeights, MambaWeights, RecurrentShape
from quire.kernels.table import REFERENCE, Ops
from quire.kernels.validation.hopper_trial import runs_on_hopper, settle_row
from quire.kernels.validation.trial_results import Findings
from quire.kernels.validation.trials import NUM_TOKENS, KernelTrial, compare, finish_writes, reference_for

NAME = "delta net's walk for Hopper"
CHANNEL_NAME = "Kimi delta net's walk for Hopper"
MAMBA_NAME = "Mamba2's walk for Hopper"
Steps = Sequence[Sequence[int]]  # tokens per row, step by step
# Prefill rows of whole and partial chunks beside decode rows, then a second step that continues them.
MIXED: Steps = ((65, 1, 130, 1), (1, 2, 64, 1))
LONE: Steps = ((130,), (65,))
ONE_REQUEST: Steps = ((NUM_TOKENS,), (1,))  # the steps of a first request: prefill, then decode


def settle_delta_net(
    ops: Ops,
    shape: RecurrentShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    strict: bool,
    findings: Findings | None = None,
) -> Ops:
    """Returns the table with the kernel, or unchanged; see `hopper_trial.settle_row`. It replaces only Triton's
    default scan, never that of the deterministic mode."""
    if not runs_on_hopper(ops, device):
        return ops
    from quire.kernels.triton.recurrent import recurrent
    from quire.kernels.triton.recurrent.scan import fits_delta_walk

    if ops.gated_delta_net is not recurrent.gated_delta_net or not fits_delta_walk(shape, dtype):
        return ops

    def exchange() -> Ops:
        from quire.kernels.triton.recurrent.hopper import gated_delta

        return replace(ops, gated_delta_net=gated_delta.gated_delta_net)

    def attempt(faster: Ops) -> None:
        for steps in _all_walks(shape, device):
            try_delta_net(faster, shape, dtype, device, steps)

    return settle_row(ops, NAME, exchange, attempt, strict=strict, findings=findings)


def settle_channel_delta(
    ops: Ops,
    shape: RecurrentShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    strict: bool,
    findings: Findings | None = None,
) -> Ops:
    """Does for Kimi Delta Attention what `settle_delta_net` does for gated delta nets."""
    if not runs_on_hopper(ops, device):
        return ops
    from quire.kernels.triton.recurrent import channel_delta as recurrent_channel
    from quire.kernels.triton.recurrent.scan import fits_channel_walk

    if ops.channel_delta_net is not recurrent_channel.channel_delta_net or not fits_channel_walk(shape, dtype):
        return ops

    def exchange() -> Ops:
        from quire.kernels.triton.recurrent.hopper import channel_delta as channel_walk

        return replace(ops, channel_delta_net=channel_walk.channel_delta_net)

    def attempt(faster: Ops) -> None:
        for steps in _all_walks(shape, device):
            try_channel_delta(faster, shape, dtype, device, steps)

    return settle_row(ops, CHANNEL_NAME, exchange, attempt, strict=strict, findings=findings)


def settle_mamba(
    ops: Ops, shape: MambaTrialShape, device: torch.device, *, strict: bool, findings: Findings | None = None
) -> Ops:
    """Does for Mamba2 what `settle_delta_net` does for gated delta nets."""
    if not runs_on_hopper(ops, device):
        return ops
    from quire.kernels.triton.recurrent import recurrent
    from quire.kernels.triton.recurrent.scan import fits_mamba_walk

    if ops.mamba2 is not recurrent.mamba2 or not fits_mamba_walk(shape.state, shape.dtype):
        return ops

    def exchange() -> Ops:
        from quire.kernels.triton.recurrent.hopper import mamba

        return replace(ops, mamba2=mamba.mamba2)

    def attempt(faster: Ops) -> None:
        for steps in (MIXED, LONE):
            try_mamba(faster, shape, device, steps)

    return settle_row(ops, MAMBA_NAME, exchange, attempt, strict=strict, findings=findings)


def _all_walks(shape: RecurrentShape, device: torch.device) -> list[Steps]:
    from quire.kernels.triton.launch import num_multiprocessors

    return walk_steps(shape.num_heads, num_multiprocessors(device.index))


def walk_steps(num_heads: int, num_processors: int) -> list[Steps]:
    """Returns steps that cover all variants of the scan kernel: with few rows two programs share a head (see
    `halves_per_program`)."""
    num_rows = num_processors // (2 * num_heads) + 1  # the fewest rows for which a head has a single program
    return [MIXED, LONE, ((65,) * num_rows, (2,) * num_rows)]


@dataclass(frozen=True, slots=True)
class MambaTrialShape:
    """The properties of Mamba2 layers that decide which kernels are compiled for them."""

    state: RecurrentShape
    norm_groups: int
    conv_bias: bool
    dt_limits: tuple[float, float]
    dtype: torch.dtype
    norm: bool = True
    gate_first: bool = True


# All kinds of layers share `plan_recurrent`, so all of them fall back together.
_fallback = reference_for("plan_recurrent", "gated_delta_net", "channel_delta_net", "mamba2", "short_conv")


def delta_net_trial(shape: RecurrentShape, dtype: torch.dtype, device: torch.device) -> KernelTrial:
    return KernelTrial("delta net", lambda ops: try_delta_net(ops, shape, dtype, device, ONE_REQUEST), _fallback)


def channel_delta_trial(shape: RecurrentShape, dtype: torch.dtype, device: torch.device) -> KernelTrial:
    return KernelTrial(
        "Kimi delta net", lambda ops: try_channel_delta(ops, shape, dtype, device, ONE_REQUEST), _fallback
    )


def mamba_trial(shape: MambaTrialShape, device: torch.device) -> KernelTrial:
    return KernelTrial("Mamba2", lambda ops: try_mamba(ops, shape, device, ONE_REQUEST), _fallback)


def short_conv_trial(shape: ConvShape, has_bias: bool, dtype: torch.dtype, device: torch.device) -> KernelTrial:
    return KernelTrial(
        "short convolution", lambda ops: try_short_conv(ops, shape, has_bias, dtype, device, ONE_REQUEST), _fallback
    )


def try_delta_net(
    ops: Ops, shape: RecurrentShape, dtype: torch.dtype, device: torch.device, steps: Steps = MIXED
) -> None:
    """Compares outputs and states over these steps with the reference; raises if they disagree."""
    weights, wide = _delta_weights(shape, shape.num_heads, dtype, device)
    inputs = shape.channels + shape.values + 2 * shape.num_heads
    _compare_steps(ops, lambda table: table.gated_delta_net, weights, wide, inputs, shape, dtype, device, steps)


def try_channel_delta(
    ops: Ops, shape: RecurrentShape, dtype: torch.dtype, device: torch.device, steps: Steps = MIXED
) -> None:
    """Compares Kimi Delta Attention with the reference as `try_delta_net` does."""
    weights, wide = _delta_weights(shape, shape.keys, dtype, device)
    inputs = shape.channels + shape.num_heads + shape.keys + shape.values
    _compare_steps(
        ops, lambda table: of_one_tensor(table.channel_delta_net), weights, wide, inputs, shape, dtype, device, steps
    )


def of_one_tensor(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps `channel_delta_net` to take its inputs concatenated in one tensor, as the other recurrent ops do."""

    def run(x: Tensor, weights: DeltaWeights, shape: RecurrentShape, state: Tensor, plan: Any) -> Tensor:
        sizes = (shape.channels + shape.num_heads, shape.keys, shape.values)
        return op(*x.split(sizes, dim=1), weights, shape, state, plan)

    return run


def try_mamba(ops: Ops, shape: MambaTrialShape, device: torch.device, steps: Steps = MIXED) -> None:
    """Compares Mamba2 with the reference as `try_delta_net` does."""
    state, dtype = shape.state, shape.dtype
    heads = state.num_heads
    weights = MambaWeights(
        _taps(state, dtype, device),
        (0.5 * _draw(device, state.channels)).to(dtype) if shape.conv_bias else None,
        _draw(device, heads) - 1.0,
        _draw(device, heads),
        _draw(device, heads),
        (_draw(device, state.values) + 1.0).to(dtype) if shape.norm else None,
        1e-6,
        shape.norm_groups,
        *shape.dt_limits,
        shape.gate_first,
    )
    bias = None if weights.conv_bias is None else weights.conv_bias.float()
    norm = None if weights.norm is None else weights.norm.float()
    wide = replace(weights, conv=weights.conv.float(), conv_bias=bias, norm=norm)
    inputs = state.values + state.channels + heads
    _compare_steps(ops, lambda table: table.mamba2, weights, wide, inputs, state, dtype, device, steps)


def try_short_conv(
    ops: Ops, shape: ConvShape, has_bias: bool, dtype: torch.dtype, device: torch.device, steps: Steps = MIXED
) -> None:
    """Compares the short convolution with the reference as `try_delta_net` does."""
    weights = ConvWeights(_taps(shape, dtype, device), _draw(device, shape.channels).to(dtype) if has_bias else None)
    wide = ConvWeights(weights.conv.float(), None if weights.bias is None else weights.bias.float())
    _compare_steps(ops, lambda table: table.short_conv, weights, wide, 3 * shape.channels, shape, dtype, device, steps)


def _compare_steps(
    ops: Ops,
    op: Callable[[Ops], Callable[..., Tensor]],
    weights: Any,
    wide: Any,
    num_inputs: int,
    shape: RecurrentShape | ConvShape,
    dtype: torch.dtype,
    device: torch.device,
    steps: Steps,
) -> None:
    """Runs the op and the reference in float32 (with the weights `wide`) step by step and compares them."""
    num_rows = len(steps[0])
    slots = torch.randperm(num_rows, device=device)
    state = 0.1 * _draw(device, num_rows, shape.slot_elements)
    exact = state.clone()
    ends = [3] * num_rows
    for counts in steps:
        positions = torch.cat([torch.arange(end, end + n, device=device) for end, n in zip(ends, counts, strict=True)])
        x = _draw(device, sum(counts), num_inputs).to(dtype)
        finish_writes(device)
        got = op(ops)(x, weights, shape, state, ops.plan_recurrent(slots, positions, list(counts)))
        compare(got, partial(_exact, op, x, wide, shape, exact, (slots, positions, list(counts))), dtype)
        ends = [end + n for end, n in zip(ends, counts, strict=True)]
    for part in (shape.rings,) if isinstance(shape, ConvShape) else (shape.matrices, shape.rings):
        compare(part(state), partial(part, exact), dtype)


def _exact(
    op: Callable[[Ops], Callable[..., Tensor]],
    x: Tensor,
    weights: Any,
    shape: Any,
    state: Tensor,
    rows: tuple[Tensor, Tensor, list[int]],
) -> Tensor:
    return op(REFERENCE)(x.float(), weights, shape, state, REFERENCE.plan_recurrent(*rows))


def _delta_weights(
    shape: RecurrentShape, num_decays: int, dtype: torch.dtype, device: torch.device
) -> tuple[DeltaWeights, DeltaWeights]:
    """Returns random weights in `dtype`, and the same weights in float32."""
    weights = DeltaWeights(
        _taps(shape, dtype, device),
        _draw(device, shape.num_heads) - 1.0,
        _draw(device, num_decays),
        (_draw(device, shape.value_dim) + 1.0).to(dtype),
        1e-6,
    )
    return weights, replace(weights, conv=weights.conv.float(), norm=weights.norm.float())


def _taps(shape: RecurrentShape | ConvShape, dtype: torch.dtype, device: torch.device) -> Tensor:
    return (0.5 * _draw(device, shape.channels, 1, shape.conv_len)).to(dtype)


def _draw(device: torch.device, *size: int) -> Tensor:
    return torch.randn(size, device=device)
