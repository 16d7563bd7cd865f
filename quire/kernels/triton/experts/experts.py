"""Expert products from one row to thousands; implements `reference.experts.run_experts`.

A few rows use plain arithmetic units, see `few_tokens`. More rows are sorted by expert and multiplied tile by tile on
the matrix units, with the weight as the left operand, so that a tile may have as few as sixteen rows. Gate projection,
up projection and activation are one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.expert_types import ExpertWeights, GatedActivation
from quire.kernels.triton.experts import few_tokens
from quire.kernels.triton.experts.few_tokens import activation_args, activation_options, gated
from quire.kernels.triton.experts.route import TILE_FIELDS, SortedPairs, sort_by_expert
from quire.kernels.triton.launch import dot_precision, launch_options, let_next_start, wait_for_inputs
from quire.kernels.triton.linear.fp8 import quantize_rows


@triton.jit
def _grouped_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    shares_ptr,
    order_ptr,
    tiles_ptr,
    out_ptr,
    x_stride,
    in_features,
    num_outs,
    num_out_blocks,
    alpha,
    shift,
    limit,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr,
    LIMITED: tl.constexpr,
    GELU: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    TILE_FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: a tile of an expert's rows times BLOCK_OUT of its outputs. GATED (the first product): rows are
    gathered by `order`, gate and up are combined, and results are stored in sorted order. Otherwise (the second
    product): rows are read in sorted order, and results are weighted and stored by pair. SCALED: both operands are FP8
    with a scale per row."""
    let_next_start(PDL)
    program = tl.program_id(0)
    tile = program // num_out_blocks
    outs = program % num_out_blocks * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    wait_for_inputs(PDL)
    expert = tl.load(tiles_ptr + tile * TILE_FIELDS).to(tl.int64)
    if expert >= 0:
        places = tl.load(tiles_ptr + tile * TILE_FIELDS + 1) + tl.arange(0, ROWS)
        live = places < tl.load(tiles_ptr + tile * TILE_FIELDS + 2)
        pairs = tl.load(order_ptr + places, mask=live, other=0)
        sources = places
        if GATED:
            sources = pairs // TOP_K
        inside = outs < num_outs
        columns = tl.arange(0, BLOCK_IN)
        weight_rows = weight_ptr + expert * (2 if GATED else 1) * num_outs * in_features
        weight_rows += outs.to(tl.int64)[:, None] * in_features + columns[None, :]
        x_rows = x_ptr + sources.to(tl.int64)[:, None] * x_stride + columns[None, :]
        acc = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
        up = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
        for start in tl.range(0, in_features, BLOCK_IN, num_stages=STAGES):
            if EVEN:
                weight = tl.load(weight_rows + start)
                x = tl.load(x_rows + start, mask=live[:, None], other=0.0)
            else:
                left = (start + columns < in_features)[None, :]
                weight = tl.load(weight_rows + start, mask=inside[:, None] & left, other=0.0)
                x = tl.load(x_rows + start, mask=live[:, None] & left, other=0.0)
            across = tl.trans(x)
            acc = tl.dot(weight, across, acc, input_precision=PRECISION)
            if GATED:
                if EVEN:
                    other = tl.load(weight_rows + num_outs * in_features + start)
                else:
                    other = tl.load(
                        weight_rows + num_outs * in_features + start, mask=inside[:, None] & left, other=0.0
                    )
                up = tl.dot(other, across, up, input_precision=PRECISION)
        if SCALED:
            scale = scale_ptr + expert * (2 if GATED else 1) * num_outs + outs
            x_scale = tl.load(x_scale_ptr + sources, mask=live, other=0.0)[None, :]
            acc *= tl.load(scale, mask=inside, other=0.0)[:, None] * x_scale
            if GATED:
                up *= tl.load(scale + num_outs, mask=inside, other=0.0)[:, None] * x_scale
        if BIAS:
            bias = bias_ptr + expert * (2 if GATED else 1) * num_outs + outs
            acc += tl.load(bias, mask=inside, other=0.0).to(tl.float32)[:, None]
            if GATED:
                up += tl.load(bias + num_outs, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            out = gated(acc, up, alpha, shift, limit, LIMITED, GELU)
            targets = places
        else:
            out = acc * tl.load(shares_ptr + pairs, mask=live, other=0.0)[None, :]
            targets = pairs
        where = targets.to(tl.int64)[None, :] * num_outs + outs[:, None]
        tl.store(out_ptr + where, out.to(out_ptr.dtype.element_ty), mask=inside[:, None] & live[None, :])


@triton.jit
def _combine_kernel(
    parts_ptr,
    residual_ptr,
    out_ptr,
    width,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum of a token's weighted results, [TOP_K, width]."""
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    wait_for_inputs(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    if RESIDUAL:
        total = tl.load(residual_ptr + token * width + columns, mask=inside, other=0.0).to(tl.float32)
    for choice in tl.static_range(TOP_K):
        total += tl.load(parts_ptr + (token * TOP_K + choice) * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


# ---------------------------------------------------------------------------------------------------------------------
# Choosing and launching


@dataclass(frozen=True, slots=True)
class GroupedTuning:
    """Tile sizes and launch options of one grouped product."""

    block_out: int
    block_in: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExpertsTuning:
    """Tunings of both grouped products."""

    rows: int  # maximum rows of a tile
    gate_up: GroupedTuning
    down: GroupedTuning


def tune(num_pairs: int, num_experts: int, scaled: bool = False) -> ExpertsTuning:
    """Choose tiles into which most experts' shares just fit: more rows would be padding, fewer would read weights
    twice. `scaled`: FP8."""
    share = num_pairs / num_experts
    if scaled:
        rows = 16 if share <= 6 else 32 if share <= 20 else 64 if share <= 48 else 128
        if rows <= 32:
            return ExpertsTuning(rows, GroupedTuning(64, 256, 4, 3), GroupedTuning(64, 256, 4, 2))
        return ExpertsTuning(rows, GroupedTuning(64, 128, 4, 3), GroupedTuning(128, 128, 4, 3))
    if share <= 6:
        return ExpertsTuning(16, GroupedTuning(64, 64, 4, 5), GroupedTuning(64, 128, 4, 4))
    if share <= 20:
        return ExpertsTuning(32, GroupedTuning(64, 64, 4, 5), GroupedTuning(64, 128, 4, 4))
    if share <= 48:
        return ExpertsTuning(64, GroupedTuning(64, 64, 4, 4), GroupedTuning(128, 64, 4, 4))
    # The second product has few columns: two programs per multiprocessor hide each other's start and end.
    return ExpertsTuning(128, GroupedTuning(128, 64, 8, 4), GroupedTuning(128, 64, 4, 3))


def run_experts(
    x: Tensor,
    experts: ExpertWeights,
    chosen: Tensor,
    weights: Tensor,
    residual: Tensor | None = None,
    tuning: ExpertsTuning | None = None,
) -> Tensor:
    """Implements `reference.experts.run_experts`; `chosen` int32 and `weights` float32, both contiguous. `tuning`:
    chosen by the number of pairs when None; if given, few rows are sorted and multiplied as many are."""
    num_tokens, width = x.shape
    if tuning is None and few_tokens.is_preferred(x, experts, chosen):
        return few_tokens.run_few(x, experts, chosen, weights, residual)
    num_experts, top_k, inner = len(experts.gate_up), chosen.shape[1], experts.down.shape[2]
    tuning = tuning or tune(chosen.numel(), num_experts, experts.down_scale is not None)
    pairs = sort_by_expert(chosen, num_experts, tuning.rows)
    joined = x.new_empty(chosen.numel(), inner)
    parts = x.new_empty(chosen.numel(), width)
    _launch_grouped(
        x,
        experts.gate_up,
        experts.gate_up_scale,
        experts.gate_up_bias,
        weights,
        pairs,
        joined,
        top_k,
        tuning.gate_up,
        experts.activation,
    )
    _launch_grouped(
        joined, experts.down, experts.down_scale, experts.down_bias, weights, pairs, parts, top_k, tuning.down, None
    )
    out = torch.empty_like(x)
    block = min(triton.next_power_of_2(width), 1024)
    _combine_kernel[(num_tokens, triton.cdiv(width, block))](
        parts,
        residual,
        out,
        width,
        TOP_K=top_k,
        BLOCK=block,
        RESIDUAL=residual is not None,
        **launch_options(x.device, num_warps=4),
    )
    return out


def _launch_grouped(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    shares: Tensor,
    pairs: SortedPairs,
    out: Tensor,
    top_k: int,
    tuning: GroupedTuning,
    activation: GatedActivation | None,
) -> None:
    in_features, num_outs = weight.shape[2], out.shape[1]
    block_out = min(tuning.block_out, max(16, triton.next_power_of_2(num_outs)))
    block_in = min(tuning.block_in, max(16, triton.next_power_of_2(in_features)))
    x_scale = None
    if scale is not None:
        x, x_scale = quantize_rows(x)
        block_in = max(32, block_in)  # minimum of the matrix units for FP8 operands
    elif x.dtype == torch.float32:
        block_in = max(16, block_in // 4)
    blocks = triton.cdiv(num_outs, block_out)
    _grouped_kernel[(pairs.num_tiles * blocks,)](
        x,
        x_scale,
        weight,
        scale,
        bias,
        shares,
        pairs.order,
        pairs.tiles,
        out,
        x.stride(0),
        in_features,
        num_outs,
        blocks,
        *activation_args(activation),
        TOP_K=top_k,
        ROWS=pairs.rows,
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        EVEN=num_outs % block_out == 0 and in_features % block_in == 0,
        GATED=activation is not None,
        **activation_options(activation),
        SCALED=scale is not None,
        BIAS=bias is not None,
        PRECISION=dot_precision(x.dtype),
        STAGES=tuning.num_stages,
        TILE_FIELDS=TILE_FIELDS,
        **launch_options(x.device, tuning.num_warps, tuning.num_stages),
    )
