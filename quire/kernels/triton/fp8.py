"""Products with FP8 (e4m3) weights: one scale per output channel, worked out once from the plain weight.

One row keeps its activations as they are (`skinny`); more rows are scaled row by row to FP8 as well, where the matrix
units are twice as fast, and multiplied by torch's scaled product, which won from two rows on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import INTERPRETED, launch_options, let_next_start, wait_for_inputs
from quire.kernels.triton.skinny import skinny_linear


@triton.jit
def _quantize_rows_kernel(x_ptr, out_ptr, scale_ptr, x_stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0), 1e-12) / 448.0
    tl.store(out_ptr + row * width + columns, (x / scale).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + row, scale)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, width] as float8_e4m3fn and what each row is to be multiplied with, [rows] float32."""
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _quantize_rows_kernel[(rows,)](
        x, out, scale, x.stride(0), width, BLOCK=block, **launch_options(x.device, min(max(block // 512, 1), 16))
    )
    return out, scale


def fp8_linear(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] times `weight` [out, in] float8_e4m3fn with `weight_scale` [out] float32 (both of `quantize_rows`).
    Returns x's type."""
    if x.shape[0] == 1 or INTERPRETED:
        return skinny_linear(x, weight, bias, weight_scale=weight_scale)
    small, scale = quantize_rows(x)
    return torch._scaled_mm(
        small, weight.t(), scale_a=scale[:, None], scale_b=weight_scale[None, :], bias=bias, out_dtype=x.dtype,
        use_fast_accum=True,
    )  # fmt: skip
