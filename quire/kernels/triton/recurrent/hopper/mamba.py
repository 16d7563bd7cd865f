"""Mamba2 on Hopper, as a row of the ops table. Prefill rows go through `mamba_kernel`, which walks over chunks. Their
inputs are computed first: keys and queries by `recurrent.conv`, gates by this module.

Unsupported shapes (see `supports`) go through `recurrent.recurrent`, so this row can replace that one in the table;
decode rows use the same kernel in both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.recurrent_types import MambaWeights, RecurrentShape
from quire.kernels.triton.launch import launch_options, let_next_start, num_multiprocessors, wait_for_inputs
from quire.kernels.triton.recurrent import recurrent
from quire.kernels.triton.recurrent.conv import convolve_keys, taps_first
from quire.kernels.triton.recurrent.hopper.gated_delta import supports_tma, tile_descriptor, token_descriptor
from quire.kernels.triton.recurrent.hopper.mamba_groups import LINES, ROW_FIELDS
from quire.kernels.triton.recurrent.hopper.mamba_kernel import _mamba_hopper_kernel
from quire.kernels.triton.recurrent.recurrent import TritonRecurrentPlan
from quire.kernels.triton.recurrent.scan import fits_mamba_walk
from quire.kernels.triton.recurrent.step import softplus

GATES = 8  # heads per program of the gates kernel
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "rows_ptr", "tiles_ptr"],
)
def _mamba_gates_kernel(
    x_ptr,
    a_log_ptr,
    dt_bias_ptr,
    gates_ptr,
    tiles_ptr,
    rows_ptr,
    slots_ptr,
    positions_ptr,
    table_ptr,
    num_rows,
    x_stride,
    dt_low,
    dt_high,
    COLUMN: tl.constexpr,
    FIELDS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: the gates of BLOCK heads of one chunk, [chunks, heads, 4, 64]. With G the running sum of the log
    decays: G, and G minus the log of the step size, both in base 2, from which the scores are computed; each token's
    decay since the chunk began; and its decay until the chunk ends, times the step size. Tokens behind the row's end
    neither decay nor write. The first `num_rows` chunks' first programs also fill the table of rows for the walk."""
    let_next_start(PDL)
    tile = tl.program_id(0)
    heads, n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, 64)
    a_log = tl.load(a_log_ptr + heads, mask=heads < HEADS, other=0.0).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + heads, mask=heads < HEADS, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    if (tile < num_rows) & (tl.program_id(1) == 0):
        row, first = tl.load(rows_ptr + 4 * tile), tl.load(rows_ptr + 4 * tile + 1)
        tl.store(table_ptr + FIELDS * tile, first)
        tl.store(table_ptr + FIELDS * tile + 1, tl.load(rows_ptr + 4 * tile + 2))
        tl.store(table_ptr + FIELDS * tile + 2, tl.load(rows_ptr + 4 * tile + 3))
        tl.store(table_ptr + FIELDS * tile + 3, tl.load(slots_ptr + row).to(tl.int32))
        tl.store(table_ptr + FIELDS * tile + 4, tl.load(positions_ptr + first).to(tl.int32))
    start = tl.load(tiles_ptr + 4 * tile + 2)
    tokens = tl.load(tiles_ptr + 4 * tile + 1).to(tl.int64) + start + n
    inside = (start + n < tl.load(tiles_ptr + 4 * tile + 3))[:, None] & (heads < HEADS)[None, :]
    step = tl.load(x_ptr + tokens[:, None] * x_stride + COLUMN + heads[None, :], mask=inside, other=0.0)
    step = softplus(step.to(tl.float32) + dt_bias[None, :])
    step = tl.where(inside, tl.minimum(tl.maximum(step, dt_low), dt_high), 0.0)
    decay = -tl.exp(a_log)[None, :] * step
    total = tl.cumsum(decay, 0)
    last = tl.sum(decay, 0)[None, :]
    target = gates_ptr + (tile * HEADS + heads[None, :]).to(tl.int64) * 256 + n[:, None]
    there = (heads < HEADS)[None, :] & (n < 64)[:, None]
    tl.store(target, total * LOG2_E, mask=there)
    tl.store(target + 64, total * LOG2_E - tl.log2(step), mask=there)
    tl.store(target + 128, tl.exp(total), mask=there)
    tl.store(target + 192, tl.exp(last - total) * step, mask=there)


def supports(x: Tensor, weights: MambaWeights, shape: RecurrentShape, state: Tensor) -> bool:
    """Whether the kernel supports the inputs; else use `recurrent.recurrent`."""
    return fits_mamba_walk(shape, x.dtype) and supports_tma(x, state) and weights.conv.dtype == x.dtype


def mamba2(x: Tensor, weights: MambaWeights, shape: RecurrentShape, state: Tensor, plan: TritonRecurrentPlan) -> Tensor:
    """Implements `reference.recurrent.mamba2`."""
    if not supports(x, weights, shape, state):
        return recurrent.mamba2(x, weights, shape, state, plan)
    # Gated values that have not been normalized may exceed float16's range.
    gated = weights.gated_early and (weights.norm is None or x.dtype == torch.bfloat16)
    return recurrent.run_mamba(x, weights, shape, state, plan, scan, gated=gated)


def scan(
    x: Tensor,
    weights: MambaWeights,
    shape: RecurrentShape,
    state: Tensor,
    slots: Tensor,
    positions: Tensor,
    rows: Tensor,
    tiles: Tensor,
    out: Tensor,
    chunk: int,
    *,
    gated: bool,
) -> None:
    """Compute the prefill rows, as `recurrent.scan.mamba_scan`."""
    taps = taps_first(weights.conv, shape)
    keys = convolve_keys(x, taps, weights.conv_bias, shape, state, slots, positions, tiles, chunk, delta=False)
    gates, table = _make_gates(x, weights, shape, slots, positions, rows, tiles)
    num_items = len(rows) * shape.num_heads
    _mamba_hopper_kernel[(min(num_items, num_multiprocessors(x.device.index)),)](
        x,
        token_descriptor(x, 64, 64),
        token_descriptor(x, 4, 64),
        tile_descriptor(x),
        tile_descriptor(keys),
        _lines_descriptor(gates),
        _decays_descriptor(gates),
        weights.conv,
        weights.conv_bias,
        weights.skip,
        state,
        out,
        table,
        num_items,
        x.stride(0),
        state.stride(0),
        GATED=gated,
        HEADS=shape.num_heads,
        GROUPS=shape.num_groups,
        TAPS=shape.conv_len,
        num_warps=4,
        launch_pdl=True,
    )


def _make_gates(
    x: Tensor,
    weights: MambaWeights,
    shape: RecurrentShape,
    slots: Tensor,
    positions: Tensor,
    rows: Tensor,
    tiles: Tensor,
) -> tuple[Tensor, Tensor]:
    """The gates [chunks, heads, 4, 64] float32, and the table of rows [rows, fields] int32."""
    heads = shape.num_heads
    gates = x.new_empty(len(tiles), heads, LINES.value, 64, dtype=torch.float32)
    table = x.new_empty(len(rows), ROW_FIELDS.value, dtype=torch.int32)
    _mamba_gates_kernel[(len(tiles), triton.cdiv(heads, GATES))](
        x,
        weights.a_log,
        weights.dt_bias,
        gates,
        tiles,
        rows,
        slots,
        positions,
        table,
        len(rows),
        x.stride(0),
        weights.dt_low,
        weights.dt_high,
        COLUMN=shape.channels + shape.values,
        FIELDS=ROW_FIELDS.value,
        HEADS=heads,
        BLOCK=GATES,
        **launch_options(x.device, 1),
    )
    return gates, table


def _lines_descriptor(gates: Tensor) -> TensorDescriptor:
    """TMA descriptor of all lines of a head and chunk."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(gates, [gates.numel() // 64, 64], [64, 1], [LINES.value, 64], layout)


def _decays_descriptor(gates: Tensor) -> TensorDescriptor:
    """TMA descriptor of the last line (decays until the chunk's end) of a head and chunk."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    last = gates[:, :, LINES.value - 1]
    return TensorDescriptor(last, [last.numel() // 64, 64], [LINES.value * 64, 1], [1, 64], layout)
