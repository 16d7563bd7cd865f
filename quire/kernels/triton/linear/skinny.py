"""Products of a few rows, bound by reading the weight, fused with the surrounding operations.

x [rows, in] times weight [out, in], with optional RMS norm before, and bias, gated activation or residual addition
after, so that a layer of a one-token step takes few launches. One row uses plain arithmetic units; up to 32 rows use
the matrix units with the weight as the left operand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.activations import Curve
from quire.kernels.triton.activations import curved
from quire.kernels.triton.launch import dot_precision, launch_options, let_next_start, wait_for_inputs
from quire.kernels.triton.linear.norm import rms_norm


@triton.jit
def _weight_tile(weight_ptr, outs, columns, in_features, num_outs, EVEN: tl.constexpr):
    """A weight's tile. EVEN: tiles fill the weight exactly; otherwise zeros are read past its ends."""
    ptr = weight_ptr + outs.to(tl.int64)[:, None] * in_features + columns[None, :]
    if EVEN:
        return tl.load(ptr)
    return tl.load(ptr, mask=(outs < num_outs)[:, None] & (columns < in_features)[None, :], other=0.0)


@triton.jit
def _input_tile(x_ptr, norm_ptr, columns, in_features, squares, NORM: tl.constexpr):
    """The input's columns, times the norm's weight if there is one, and the running squares."""
    columns = columns[None, :]  # as one row of a tile, it is in the threads that hold the weight's columns
    inside = columns < in_features
    x = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        squares += x * x
        x = x * tl.load(norm_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    return x, squares


@triton.jit
def _add_products(acc, weight, x, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr):
    """`acc` plus products: eight neighbours, held by one thread, are added at once, which saves registers."""
    return acc + tl.sum(tl.reshape(weight.to(tl.float32) * x, [BLOCK_OUT, BLOCK_IN // 8, 8]), 2)


@triton.jit
def _one_row_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    in_features,
    out_features,
    eps,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    EVEN: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    LOOP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_OUT outputs of the only row, on plain arithmetic units."""
    let_next_start(PDL)
    program = tl.program_id(0)
    outs = program * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    columns = tl.arange(0, BLOCK_IN)
    up_ptr = weight_ptr + tl.cast(out_features, tl.int64) * in_features  # Triton makes an `out_features` of 1 constant
    # Weights are not written by any kernel: the first tile is loaded before the input is ready, and each later one
    # before the current one is used.
    weight = _weight_tile(weight_ptr, outs, columns, in_features, out_features, EVEN)
    other = weight
    if GATE is not None:
        other = _weight_tile(up_ptr, outs, columns, in_features, out_features, EVEN)
    acc = tl.zeros([BLOCK_OUT, BLOCK_IN // 8], tl.float32)
    up = tl.zeros([BLOCK_OUT, BLOCK_IN // 8], tl.float32)
    squares = tl.zeros([1, BLOCK_IN], tl.float32)
    wait_for_inputs(PDL)
    last = 0
    if LOOP:  # more than one tile; otherwise the registers of a second one are saved
        last = (in_features - 1) // BLOCK_IN * BLOCK_IN
        for start in range(0, last, BLOCK_IN):
            x, squares = _input_tile(x_ptr, norm_ptr, start + columns, in_features, squares, NORM)
            after = start + BLOCK_IN + columns
            next_weight = _weight_tile(weight_ptr, outs, after, in_features, out_features, EVEN)
            if GATE is not None:
                next_other = _weight_tile(up_ptr, outs, after, in_features, out_features, EVEN)
            acc = _add_products(acc, weight, x, BLOCK_OUT, BLOCK_IN)
            weight = next_weight
            if GATE is not None:
                up = _add_products(up, other, x, BLOCK_OUT, BLOCK_IN)
                other = next_other
    x, squares = _input_tile(x_ptr, norm_ptr, last + columns, in_features, squares, NORM)
    acc = _add_products(acc, weight, x, BLOCK_OUT, BLOCK_IN)
    if GATE is not None:
        up = _add_products(up, other, x, BLOCK_OUT, BLOCK_IN)
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / in_features + eps)
    inside = outs < out_features
    out = tl.sum(acc, 1) * factor
    if SCALED:
        out = out * tl.load(scale_ptr + outs, mask=inside, other=0.0)
    if BIAS:
        out += tl.load(bias_ptr + outs, mask=inside, other=0.0).to(tl.float32)
    if GATE is not None:
        right = tl.sum(up, 1) * factor
        if SCALED:
            right = right * tl.load(scale_ptr + out_features + outs, mask=inside, other=0.0)
        if BIAS:
            right += tl.load(bias_ptr + out_features + outs, mask=inside, other=0.0).to(tl.float32)
        out = curved(out, GATE) * right
    if RESIDUAL:
        out += tl.load(residual_ptr + outs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + outs, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])  # sixteen rows must not select another kernel
def _few_rows_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    in_features,
    out_features,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    EVEN: tl.constexpr,
    GATE: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_OUT outputs of all rows, on the matrix units."""
    let_next_start(PDL)
    program = tl.program_id(0)
    outs = program * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    rows = tl.arange(0, ROWS)
    live = rows < num_rows
    acc = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    up = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    wait_for_inputs(PDL)
    for start in tl.range(0, in_features, BLOCK_IN, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK_IN)
        inside = columns < in_features
        weight = _weight_tile(weight_ptr, outs, columns, in_features, out_features, EVEN)
        x = tl.load(
            x_ptr + rows[:, None] * x_stride + columns[None, :], mask=live[:, None] & inside[None, :], other=0.0
        )
        across = tl.trans(x)
        acc = tl.dot(weight.to(x.dtype), across, acc, input_precision=PRECISION)
        if GATE is not None:
            other = _weight_tile(
                weight_ptr + tl.cast(out_features, tl.int64) * in_features,
                outs,
                columns,
                in_features,
                out_features,
                EVEN,
            )
            up = tl.dot(other.to(x.dtype), across, up, input_precision=PRECISION)
    inside = outs < out_features
    out = acc
    right = up
    if SCALED:
        out = out * tl.load(scale_ptr + outs, mask=inside, other=0.0)[:, None]
    if BIAS:
        out += tl.load(bias_ptr + outs, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATE is not None:
        if SCALED:
            right = right * tl.load(scale_ptr + out_features + outs, mask=inside, other=0.0)[:, None]
        if BIAS:
            right += tl.load(bias_ptr + out_features + outs, mask=inside, other=0.0).to(tl.float32)[:, None]
        out = curved(out, GATE) * right
    place = rows[None, :] * out_features + outs[:, None]
    mask = inside[:, None] & live[None, :]
    if RESIDUAL:
        out += tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class SkinnyTuning:
    """Tile sizes and launch options of a skinny product."""

    block_out: int
    block_in: int
    num_warps: int
    num_stages: int


def tune(num_rows: int, out_features: int, in_features: int, element_size: int, gate: Curve | None) -> SkinnyTuning:
    """Choose a tuning, by measurement on an H200 for the products of nine models."""
    if num_rows > 1:
        return _tune_few(num_rows, out_features, element_size, gate)
    if element_size == 1:  # all columns at once: a loop would convert the input's layout for every tile
        if in_features > 4096:
            narrows = gate is None and out_features <= in_features <= 16384
            return SkinnyTuning(1, 16384, 4, 1) if narrows else SkinnyTuning(2, 16384, 8, 1)
        return SkinnyTuning(2, 4096, 4, 1) if out_features <= 4096 and gate is None else SkinnyTuning(4, 4096, 4, 1)
    # All columns at once, as a loop's end waits for its last tile, unless too much of that tile is past their end.
    columns = triton.next_power_of_2(in_features)
    fills = 3 * in_features >= 2 * columns
    if gate is not None:  # two tiles are held at once
        return _tune_gated(in_features, columns, fills)
    if in_features <= 1024:
        return SkinnyTuning(4, 1024, 1, 1)
    if in_features <= 2048 and fills:
        return SkinnyTuning(2, 2048, 8, 1) if out_features <= 2048 else SkinnyTuning(4, 2048, 2, 1)
    if in_features <= 4096 and fills:
        return SkinnyTuning(2, 4096, 4, 1) if out_features <= 3072 else SkinnyTuning(4, 4096, 4, 1)
    # Programs of four outputs have as many bytes in flight as those of eight only if they are enough to fill the GPU.
    return SkinnyTuning(4, 1024, 4, 1) if in_features > 4096 and out_features >= 3840 else SkinnyTuning(8, 1024, 4, 1)


def _tune_gated(in_features: int, columns: int, fills: bool) -> SkinnyTuning:
    if in_features <= 2048:
        return SkinnyTuning(2, 1024, 1, 1)
    if in_features <= 8192 and fills:
        return SkinnyTuning(2, columns, 8, 1)
    return SkinnyTuning(2, 512, 2, 1) if in_features <= 4096 else SkinnyTuning(4, 1024, 4, 1)


def _tune_few(num_rows: int, out_features: int, element_size: int, gate: Curve | None) -> SkinnyTuning:
    """Choose blocks so small that there are several programs per multiprocessor, if there are enough outputs, with much
    of the weight in flight. More rows need larger blocks, because every program reads all of x."""
    if element_size == 1:
        return SkinnyTuning(64, 128, 4, 5)
    if gate is not None:
        return SkinnyTuning(32, 128, 2, 4) if out_features > 4096 else SkinnyTuning(64, 128, 4, 4)
    if num_rows > 16:
        return SkinnyTuning(16, 256, 4, 6) if out_features <= 2048 else SkinnyTuning(32, 256, 4, 6)
    if out_features <= 1024:
        return SkinnyTuning(32, 256, 4, 4)
    # With few outputs and many inputs, larger blocks are faster in isolation but not in a model: small programs start
    # beside those of the preceding kernel.
    return SkinnyTuning(16, 256, 2, 6) if out_features <= 4096 else SkinnyTuning(16, 512, 2, 3)


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    gate: Curve | None = None,
    residual: Tensor | None = None,
    weight_scale: Tensor | None = None,
    tuning: SkinnyTuning | None = None,
) -> Tensor:
    """x [rows <= 32, in], contiguous, times `weight` [out, in] (x's type, or float8_e4m3fn with `weight_scale` [out]
    float32). In order: rms_norm(x, norm_weight, eps), product, + bias, activation `gate` of the output's first half
    times its second half, + residual. Returns [rows, out], or [rows, out / 2] with `gate`.
    """
    num_rows, in_features = x.shape
    out_features = weight.shape[0] // 2 if gate is not None else weight.shape[0]
    tuning = tuning or tune(num_rows, out_features, in_features, weight.element_size(), gate)
    if num_rows > 1 and norm_weight is not None:
        # Worth a launch: inside the product every program would normalize every row again.
        x, norm_weight = rms_norm(x, norm_weight, eps), None
    out = x.new_empty(num_rows, out_features)
    block_in = min(tuning.block_in, triton.next_power_of_2(in_features))
    if x.dtype == torch.float32:
        block_in = max(16, block_in // 4)
    constants = {
        "BLOCK_OUT": tuning.block_out,
        "BLOCK_IN": block_in,
        "EVEN": out_features % tuning.block_out == 0 and in_features % block_in == 0,
        "GATE": gate,
        "SCALED": weight_scale is not None,
        "BIAS": bias is not None,
        "RESIDUAL": residual is not None,
        **launch_options(x.device, tuning.num_warps, tuning.num_stages),
    }
    grid = (triton.cdiv(out_features, tuning.block_out),)
    if num_rows == 1:
        _one_row_kernel[grid](
            x,
            weight,
            weight_scale,
            bias,
            norm_weight,
            residual,
            out,
            in_features,
            out_features,
            eps,
            NORM=norm_weight is not None,
            LOOP=in_features > block_in,
            **constants,
        )
    else:
        _few_rows_kernel[grid](
            x,
            weight,
            weight_scale,
            bias,
            residual,
            out,
            num_rows,
            in_features,
            out_features,
            x.stride(0),
            ROWS=max(16, triton.next_power_of_2(num_rows)),
            PRECISION=dot_precision(x.dtype),
            STAGES=tuning.num_stages,
            **constants,
        )
    return out
