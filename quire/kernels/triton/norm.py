"""RMS norm and SiLU-mul: Triton twins of `kernels.reference`, math in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import launch_options, let_next_start, wait_for_inputs


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, width, eps, num_weight_rows, BLOCK: tl.constexpr,
                     PDL: tl.constexpr):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + (row % num_weight_rows) * width + columns, mask=inside, other=0.0)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
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
    block = triton.next_power_of_2(width)
    num_warps = min(max(block // 512, 1), 16)
    _rms_norm_kernel[(x.numel() // width,)](
        x, weight, out, width, eps, weight.numel() // width, BLOCK=block, **launch_options(x.device, num_warps)
    )
    return out


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
