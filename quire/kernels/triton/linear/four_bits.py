"""Products with weights that stay in four bits: each tile is decoded in registers, and the matrix units multiply it in
the dtype of the activations. A weight's bytes are read once for every BLOCK_ROWS rows of activations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.four_bits import ZERO, FourBits
from quire.kernels.triton.launch import dot_precision, launch_options, let_next_start, wait_for_inputs


@triton.jit
def _four_bits_kernel(
    x_ptr,
    numbers_ptr,
    scale_ptr,
    least_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    in_features,
    out_features,
    x_stride,
    GROUP: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    HAS_LEAST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_ROWS rows times BLOCK_OUT outputs. Weights do not change: only `x` has to be waited for."""
    let_next_start(PDL)
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    halves, columns = tl.arange(0, BLOCK_IN // 2), tl.arange(0, BLOCK_IN)
    num_groups = in_features // GROUP
    inside = (outs < out_features)[:, None]
    of_out = outs.to(tl.int64)[:, None]
    acc = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    wait_for_inputs(PDL)
    for start in range(0, in_features, BLOCK_IN):
        bytes_at = start // 2 + halves
        packed = tl.load(
            numbers_ptr + of_out * (in_features // 2) + bytes_at[None, :],
            mask=inside & (bytes_at < in_features // 2)[None, :],
            other=0,
        )
        numbers = tl.interleave(packed & 15, packed >> 4).to(tl.float32)  # [BLOCK_OUT, BLOCK_IN]
        at = start + columns
        has_column = inside & (at < in_features)[None, :]
        group = of_out * num_groups + (at // GROUP)[None, :]
        scale = tl.load(scale_ptr + group, mask=has_column, other=0.0).to(tl.float32)
        if HAS_LEAST:
            weight = numbers * scale + tl.load(least_ptr + group, mask=has_column, other=0.0).to(tl.float32)
        else:
            weight = (numbers - ZERO_POINT) * scale
        x = tl.load(
            x_ptr + rows.to(tl.int64)[None, :] * x_stride + at[:, None],
            mask=(rows < num_rows)[None, :] & (at < in_features)[:, None],
            other=0.0,
        )
        acc += tl.dot(weight.to(x.dtype), x, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + outs, mask=outs < out_features, other=0.0).to(tl.float32)[:, None]
    place = rows.to(tl.int64)[None, :] * out_features + outs[:, None]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=inside & (rows < num_rows)[None, :])


def four_bit_linear(x: Tensor, weight: FourBits, bias: Tensor | None) -> Tensor:
    """As the reference of the same name."""
    num_rows, in_features = x.shape
    out_features, columns = weight.shape
    assert columns == in_features and x.stride(1) == 1
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    block_rows = 16 if num_rows <= 16 else 64
    block_out, block_in = 64, 64
    grid = (triton.cdiv(out_features, block_out), triton.cdiv(num_rows, block_rows))
    if not num_rows:
        return out
    _four_bits_kernel[grid](
        x,
        weight.numbers,
        weight.scales,
        weight.least,
        bias,
        out,
        num_rows,
        in_features,
        out_features,
        x.stride(0),
        GROUP=weight.group,
        ZERO_POINT=ZERO,
        BLOCK_ROWS=block_rows,
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        HAS_LEAST=weight.least is not None,
        HAS_BIAS=bias is not None,
        PRECISION=dot_precision(x.dtype),
        **launch_options(x.device, num_warps=4, num_stages=3),
    )
    return out
