"""Products with FP8 (e4m3) weights, which have one scale per output channel, computed once from the plain weight.

A single row keeps its activations unquantized (`skinny`). More rows are quantized row by row to FP8, in which the
matrix units are twice as fast, and multiplied by torch's scaled product, which is faster from two rows on."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.activations import Curve
from quire.kernels.triton.activations import curved
from quire.kernels.triton.launch import INTERPRETED, launch_options, let_next_start, wait_for_inputs
from quire.kernels.triton.linear.skinny import skinny_linear

MULTIPLE = 16  # sides of a weight must be multiples of this for the matrix units; others are padded with zeros


@triton.jit
def _quantize_rows_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    scale_ptr,
    x_stride,
    width,
    out_width,
    eps,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: quantizes one row, after its norm or gated activation."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    if NORM:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if GATE is not None:
        up = tl.load(x_ptr + row * x_stride + width + columns, mask=inside, other=0.0).to(tl.float32)
        x = curved(x, GATE) * up
    if NORM:
        x = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * weight
    most = tl.maximum(tl.max(tl.abs(x), 0), 1e-12)
    stored = (x * (448.0 / most)).to(out_ptr.dtype.element_ty)  # 0 past the row's end
    tl.store(out_ptr + row * out_width + columns, stored, mask=columns < out_width)
    tl.store(scale_ptr + row, most / 448.0)


def quantize_rows(
    x: Tensor, *, norm_weight: Tensor | None = None, eps: float = 0.0, gate: Curve | None = None
) -> tuple[Tensor, Tensor]:
    """x [rows, width] as float8_e4m3fn, and each row's scale, [rows] float32; after a norm, or after the activation
    `gate` of the first half times the second half, which halves the width. The width is padded with zeros to a
    `MULTIPLE`."""
    rows, width = x.shape[0], x.shape[1] // 2 if gate is not None else x.shape[1]
    out_width = triton.cdiv(width, MULTIPLE) * MULTIPLE
    out = torch.empty(rows, out_width, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(out_width)
    _quantize_rows_kernel[(rows,)](
        x,
        norm_weight,
        out,
        scale,
        x.stride(0),
        width,
        out_width,
        eps,
        NORM=norm_weight is not None,
        GATE=gate,
        BLOCK=block,
        **launch_options(x.device, _quantize_warps(rows, block)),
    )
    return out, scale


def _quantize_warps(rows: int, block: int) -> int:
    """Number of warps, by measurement: many rows keep memory busy with few warps each, few rows need many."""
    return min(max(block // 1024, 1), 8) if rows >= 1024 else min(max(block // 512, 1), 32)


@triton.jit
def _dequantize_pages_kernel(
    k_ptr,
    v_ptr,
    k_out_ptr,
    v_out_ptr,
    table_ptr,
    rows_ptr,
    columns_ptr,
    table_stride,
    page_stride,
    k_scale,
    v_scale,
    page_elements,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one piece of a page. Pages are split into pieces so that few pages also occupy the GPU."""
    let_next_start(PDL)
    place = tl.program_id(0)
    begin = tl.program_id(1) * PIECE
    wait_for_inputs(PDL)
    row, column = tl.load(rows_ptr + place).to(tl.int64), tl.load(columns_ptr + place)
    page = tl.load(table_ptr + row * table_stride + column).to(tl.int64)
    for start in range(0, PIECE, BLOCK):
        elements = begin + start + tl.arange(0, BLOCK)
        inside = elements < page_elements
        source, target = page * page_stride + elements, place.to(tl.int64) * page_elements + elements
        k = tl.load(k_ptr + source, mask=inside, other=0.0).to(tl.float32) * k_scale
        v = tl.load(v_ptr + source, mask=inside, other=0.0).to(tl.float32) * v_scale
        tl.store(k_out_ptr + target, k.to(k_out_ptr.dtype.element_ty), mask=inside)
        tl.store(v_out_ptr + target, v.to(v_out_ptr.dtype.element_ty), mask=inside)


def dequantize_pages(
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    rows: Tensor,
    columns: Tensor,
    k_out: Tensor,
    v_out: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Dequantize page `page_table[rows[i], columns[i]]` of the FP8 caches [pages, page_tokens, kv_heads, head_dim] into
    page i of the outputs. Worth it for attention that reads a page many times."""
    page_elements, piece = k_out[0].numel(), 16384
    _dequantize_pages_kernel[(len(rows), triton.cdiv(page_elements, piece))](
        k_cache,
        v_cache,
        k_out,
        v_out,
        page_table,
        rows,
        columns,
        page_table.stride(0),
        k_cache.stride(0),
        k_scale,
        v_scale,
        page_elements,
        PIECE=piece,
        BLOCK=2048,
        **launch_options(k_cache.device, num_warps=4),
    )


def fp8_linear(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] times `weight` [out, in] float8_e4m3fn with `weight_scale` [out] float32, both from `quantize_rows`.
    Returns x's type."""
    if x.shape[0] == 1 or INTERPRETED:
        return skinny_linear(x, weight, bias, weight_scale=weight_scale)
    return scaled_product(*quantize_rows(x), weight, weight_scale, bias, x.dtype)


def scaled_product(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """x [rows, in] times `weight` [out, in], both float8_e4m3fn with their scales [rows] and [out]."""
    inside = None if dtype == torch.float32 else bias  # torch cannot add a bias inside a product with a float32 result
    out = torch._scaled_mm(
        x,
        weight.t(),
        scale_a=x_scale[:, None],
        scale_b=weight_scale[None, :],
        bias=inside,
        out_dtype=dtype,
        use_fast_accum=True,
    )
    return out if bias is None or bias is inside else out.add_(bias)
