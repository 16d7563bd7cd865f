"""Kimi Delta Attention on Hopper, as a row of the ops table. Prefill rows go through `channel_chunks`, which prepares
all chunks of all rows at once, and `channel_kernel`, which walks over them. Unsupported shapes (see `supports`) and
decode rows go through `recurrent.channel_delta`."""

from __future__ import annotations

from torch import Tensor, float32, int32

from quire.kernels.recurrent_types import DeltaWeights, RecurrentShape
from quire.kernels.triton.launch import num_multiprocessors
from quire.kernels.triton.recurrent import channel_delta as recurrent_channel
from quire.kernels.triton.recurrent.hopper.channel_chunks import _channel_ready_kernel
from quire.kernels.triton.recurrent.hopper.channel_kernel import _channel_hopper_kernel
from quire.kernels.triton.recurrent.hopper.gated_delta import (
    halves_per_program,
    line_descriptor,
    supports_tma,
    tile_descriptor,
    token_descriptor,
)
from quire.kernels.triton.recurrent.recurrent import TritonRecurrentPlan
from quire.kernels.triton.recurrent.scan import fits_channel_walk

PREPARE_REGISTERS = 168  # per thread: three programs of the preparing kernel fit on a multiprocessor


def supports(x: Tensor, forget: Tensor, gate: Tensor, shape: RecurrentShape, state: Tensor) -> bool:
    """Whether the kernels support the inputs; else use `recurrent.channel_delta`."""
    inputs = (x, forget, gate)
    copied = all(supports_tma(each, state) and each.dtype == x.dtype for each in inputs)
    return fits_channel_walk(shape, x.dtype) and copied


def channel_delta_net(
    x: Tensor,
    forget: Tensor,
    gate: Tensor,
    weights: DeltaWeights,
    shape: RecurrentShape,
    state: Tensor,
    plan: TritonRecurrentPlan,
) -> Tensor:
    """Implements `reference.recurrent.channel_delta_net`."""
    walk = scan if supports(x, forget, gate, shape, state) else recurrent_channel.scan
    return recurrent_channel.run_channel_delta(x, forget, gate, weights, shape, state, plan, walk)


def scan(
    x: Tensor,
    forget: Tensor,
    gate: Tensor,
    weights: DeltaWeights,
    shape: RecurrentShape,
    state: Tensor,
    slots: Tensor,
    positions: Tensor,
    rows: Tensor,
    tiles: Tensor,
    out: Tensor,
    chunk: int,
) -> None:
    """Compute the prefill rows, as `recurrent.channel_delta.scan`."""
    num_tiles, heads = len(tiles), shape.num_heads
    keys = x.new_empty(num_tiles, 2 * heads, 64, 128)  # queries, then keys: see `channel_chunks`
    values, w = x.new_empty(num_tiles, heads, 64, 128), x.new_empty(num_tiles, heads, 64, 128)
    t, scores = x.new_empty(num_tiles, heads, 64, 64), x.new_empty(num_tiles, heads, 64, 64)
    fades = x.new_empty(num_tiles, heads, 4, 64, dtype=float32)  # two lines: decays; two: sums for the walk's norm
    _channel_ready_kernel[(heads, num_tiles)](
        x,
        token_descriptor(x, 64),
        token_descriptor(x, 4),
        token_descriptor(forget, 64),
        weights.conv,
        weights.a_log,
        weights.dt_bias,
        state,
        keys.view(int32),
        w.view(int32),
        values,
        fades,
        tile_descriptor(t),
        tile_descriptor(scores),
        slots,
        positions,
        tiles,
        x.stride(0) // 8,
        state.stride(0),
        shape.key_dim**-0.5,
        HEADS=heads,
        TAPS=shape.conv_len,
        BETA_TOP=shape.beta_top,
        num_warps=4,
        maxnreg=PREPARE_REGISTERS,
    )
    halves = halves_per_program(heads * len(rows), num_multiprocessors(x.device.index))
    _channel_hopper_kernel[(heads * 2 // halves, len(rows))](
        x,
        tile_descriptor(keys),
        tile_descriptor(w),
        tile_descriptor(values),
        tile_descriptor(t),
        tile_descriptor(scores),
        line_descriptor(fades),
        tile_descriptor(gate),
        fades,
        weights.norm,
        state,
        out,
        slots,
        positions,
        rows,
        x.stride(0),
        state.stride(0),
        weights.eps,
        HALVES=halves,
        HEADS=heads,
        TAPS=shape.conv_len,
        num_warps=4,
        launch_pdl=True,
    )
