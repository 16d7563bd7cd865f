"""Batch-invariant products of the deterministic mode on CUDA: a row's sums have one order, whatever the number of rows.

The weight is always the left operand of the matrix units, and every output element is one chain of sums along the
columns, sixteen at a time from first to last. The number of rows determines how many share a program, and so the width
of the right operand, but never the order of a sum. `tests/gpu/test_deterministic.py` compares bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.activations import Curve
from quire.kernels.triton.launch import (
    dot_precision,
    launch_options,
    let_next_start,
    num_multiprocessors,
    wait_for_inputs,
)
from quire.kernels.triton.linear import norm

GROUP = 8  # output tiles processed side by side, so that the rows they share are read from L2


@triton.jit(do_not_specialize=["num_rows"])  # sixteen rows must not select another kernel
def _fixed_linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    in_features,
    out_features,
    x_stride,
    OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: OUTS outputs of ROWS rows. EVEN: tiles fill the weight exactly."""
    let_next_start(PDL)
    program = tl.program_id(0)
    num_row_tiles = tl.cdiv(num_rows, ROWS)
    num_out_tiles = tl.cdiv(out_features, OUTS)
    first = program // (GROUP * num_row_tiles) * GROUP
    size = tl.minimum(num_out_tiles - first, GROUP)
    place = program % (GROUP * num_row_tiles)
    outs = (first + place % size) * OUTS + tl.arange(0, OUTS)
    rows = place // size * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    live = rows < num_rows
    inside = outs < out_features
    weights = weight_ptr + outs.to(tl.int64)[:, None] * in_features + columns[None, :]
    inputs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + columns[None, :]
    acc = tl.zeros([OUTS, ROWS], tl.float32)
    wait_for_inputs(PDL)
    for start in tl.range(0, in_features, COLUMNS, num_stages=STAGES):
        if EVEN:
            weight = tl.load(weights + start)
            x = tl.load(inputs + start, mask=live[:, None], other=0.0)
        else:
            there = (start + columns < in_features)[None, :]
            weight = tl.load(weights + start, mask=inside[:, None] & there, other=0.0)
            x = tl.load(inputs + start, mask=live[:, None] & there, other=0.0)
        acc = tl.dot(weight, tl.trans(x), acc, input_precision=PRECISION)
    out = acc
    if BIAS:
        out += tl.load(bias_ptr + outs, mask=inside, other=0.0).to(tl.float32)[:, None]
    target = rows.to(tl.int64)[None, :] * out_features + outs[:, None]
    mask = inside[:, None] & live[None, :]
    if RESIDUAL:
        out += tl.load(residual_ptr + target, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile sizes and launch options of a product."""

    outs: int
    rows: int
    columns: int  # columns loaded per iteration; sums continue from one iteration to the next
    num_warps: int
    num_stages: int


def choose_tile(num_rows: int, in_features: int, out_features: int, dtype: torch.dtype, multiprocessors: int) -> Tile:
    """Choose a tile, by measurement on an H200. A program mostly waits, so few rows are cut until every multiprocessor
    has a program, or two that fit side by side; many rows share their loads."""
    if dtype == torch.float32:  # no tensor cores; operands are held in registers
        return Tile(64, 16, 32, 4, 2) if num_rows <= 16 else Tile(64, 64, 32, 8, 2)
    narrow = triton.cdiv(out_features, 64)
    if narrow * triton.cdiv(num_rows, 16) <= multiprocessors or num_rows <= 16:
        return Tile(64, 16, 256, 4, 5) if in_features % 256 == 0 else Tile(64, 16, 128, 4, 5)
    if narrow * triton.cdiv(num_rows, 32) <= multiprocessors or num_rows <= 32:
        return Tile(64, 32, 128, 4, 5)
    if narrow * triton.cdiv(num_rows, 64) <= 2 * multiprocessors or num_rows <= 64:
        return Tile(64, 64, 128, 4, 4 if narrow * triton.cdiv(num_rows, 64) <= multiprocessors else 3)
    wide = triton.cdiv(out_features, 128)
    if wide * triton.cdiv(num_rows, 128) < multiprocessors:
        return Tile(64, 128, 64, 4, 4)
    is_plenty = wide * triton.cdiv(num_rows, 256) >= 8 * multiprocessors  # so that a partial last round is cheap
    return Tile(128, 256 if is_plenty else 128, 64, 8, 3)


def fixed_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    tile: Tile | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x [rows, in] times `weight` [out, in], + bias, + residual [rows, out]; rounded once, to x's type by default."""
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    out = x.new_empty(num_rows, out_features, dtype=out_dtype or x.dtype)
    if not num_rows:
        return out
    tile = tile or choose_tile(num_rows, in_features, out_features, x.dtype, num_multiprocessors(x.device.index))
    columns = min(tile.columns, max(16, triton.next_power_of_2(in_features)))
    _fixed_linear_kernel[(triton.cdiv(out_features, tile.outs) * triton.cdiv(num_rows, tile.rows),)](
        x,
        weight,
        bias,
        residual,
        out,
        num_rows,
        in_features,
        out_features,
        x.stride(0),
        OUTS=tile.outs,
        ROWS=tile.rows,
        COLUMNS=columns,
        EVEN=out_features % tile.outs == 0 and in_features % columns == 0,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        PRECISION=dot_precision(x.dtype),
        STAGES=tile.num_stages,
        GROUP=GROUP,
        **launch_options(x.device, tile.num_warps, tile.num_stages),
    )
    return out


class DeterministicLinear:
    """Implements the table's `FusedLinear`, for any number of rows."""

    def wins(self, num_rows: int, weight: Tensor, gate: Curve | None) -> bool:
        return True

    def run(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        eps: float,
        gate: Curve | None,
        residual: Tensor | None,
    ) -> Tensor:
        if norm_weight is not None:
            x = norm.rms_norm(x, norm_weight, eps)
        if gate is None:
            return fixed_linear(x, weight, bias, residual)
        out = norm.gate_mul(fixed_linear(x, weight, bias), gate)
        return out if residual is None else out.add_(residual)
