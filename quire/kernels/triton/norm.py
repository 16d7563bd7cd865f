"""RMS norm, residual addition with RMS norm, and SiLU-mul: Triton twins of `kernels.reference`, math in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import launch_options, let_next_start, wait_for_inputs


@triton.jit
def _rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, out_ptr, x_row_stride, width, eps, num_weight_rows,
                     ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + (row % num_weight_rows) * width + columns, mask=inside, other=0.0)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * x_row_stride + columns, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row * width + columns, mask=inside, other=0.0)
        # The stream is rounded to its own type before it is normed, as it will be when the next layer reads it.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * x_row_stride + columns, x, mask=inside)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(out_ptr + row * width + columns, (x * scale * weight.to(tl.float32)).to(out_ptr.dtype.element_ty),
             mask=inside)  # fmt: skip


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, row_stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    wait_for_inputs(PDL)
    gate = tl.load(gate_up_ptr + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + width + columns, mask=inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * width + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Twin of `reference.rms_norm`; `weight` is [width] or [heads, width] for x of [tokens, heads, width]."""
    x = x.contiguous()
    width = x.shape[-1]
    out = torch.empty_like(x)
    _launch_norm(x, x, weight, out, eps, num_weight_rows=weight.numel() // width, add=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Twin of `reference.add_rms_norm`: the normed sum and the sum, which replaces `x` in its memory."""
    out = torch.empty_like(residual)
    _launch_norm(x, residual, weight, out, eps, num_weight_rows=1, add=True)
    return out, x


def silu_mul(gate_up: Tensor) -> Tensor:
    """Twin of `reference.silu_mul`."""
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    num_rows = out.numel() // width
    block = min(triton.next_power_of_2(width), 1024)
    _silu_mul_kernel[(num_rows, triton.cdiv(width, block))](
        gate_up, out, gate_up.stride(-2) if gate_up.dim() > 1 else 2 * width, width, BLOCK=block,
        **launch_options(gate_up.device, num_warps=4),
    )  # fmt: skip
    return out


def _launch_norm(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, num_weight_rows: int,
                 add: bool) -> None:  # fmt: skip
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    num_warps = min(max(block // 512, 1), 16)
    x_row_stride = x.stride(-2) if x.dim() > 1 else width
    _rms_norm_kernel[(x.numel() // width,)](
        x, residual, weight, out, x_row_stride, width, eps, num_weight_rows, ADD=add, BLOCK=block,
        **launch_options(x.device, num_warps),
    )  # fmt: skip
