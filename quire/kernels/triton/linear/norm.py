"""RMS norm, gated activation (`gate_mul`), and a norm fused with the addition to the residual stream. Implements
`kernels.reference.small_ops`; math in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.activations import Curve
from quire.kernels.triton.activations import curved
from quire.kernels.triton.launch import launch_options, let_next_start, wait_for_inputs


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, width, eps, num_weight_rows, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program: normalizes one row."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + (row % num_weight_rows) * width + columns, mask=inside, other=0.0)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(
        out_ptr + row * width + columns, (x * scale * weight.to(tl.float32)).to(out_ptr.dtype.element_ty), mask=inside
    )


@triton.jit
def _norm_add_kernel(
    x_ptr, weight_ptr, stream_ptr, width, stream_stride, eps, factor, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One program: normalizes one row and adds it to the residual stream."""
    let_next_start(PDL)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    row = tl.program_id(0).to(tl.int64)
    place = stream_ptr + row * stream_stride + columns
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    stream = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    stream += x * scale * weight.to(tl.float32) * factor
    tl.store(place, stream.to(stream_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gate_mul_kernel(
    gate_up_ptr, out_ptr, row_stride, width, CURVE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One program: BLOCK columns of one row."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    wait_for_inputs(PDL)
    gate = tl.load(gate_up_ptr + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + width + columns, mask=inside, other=0.0).to(tl.float32)
    out = curved(gate, CURVE) * up
    tl.store(out_ptr + row * width + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension; `weight` is [width], or [heads, width] for x of [tokens, heads, width]."""
    x = x.contiguous()
    width = x.shape[-1]
    out = torch.empty_like(x)
    block, num_warps = _whole_row(width)
    _rms_norm_kernel[(x.numel() // width,)](
        x, weight, out, width, eps, weight.numel() // width, BLOCK=block, **launch_options(x.device, num_warps)
    )
    return out


def norm_add(x: Tensor, weight: Tensor, eps: float, stream: Tensor, factor: float) -> Tensor:
    """Add `factor` times rms_norm(x, weight, eps) to `stream` [tokens, width] in place."""
    x = x.contiguous()
    block, num_warps = _whole_row(x.shape[1])
    _norm_add_kernel[(len(x),)](
        x, weight, stream, x.shape[1], stream.stride(0), eps, factor, BLOCK=block, **launch_options(x.device, num_warps)
    )
    return stream


def _whole_row(width: int) -> tuple[int, int]:
    """Block size that holds a whole row, and number of warps."""
    block = triton.next_power_of_2(width)
    return block, min(max(block // 512, 1), 16)


def gate_mul(gate_up: Tensor, curve: Curve = "silu") -> Tensor:
    """Activation `curve` of the first half of each row times the second half."""
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    num_rows = out.numel() // width
    block = min(triton.next_power_of_2(width), 1024)
    _gate_mul_kernel[(num_rows, triton.cdiv(width, block))](
        gate_up,
        out,
        gate_up.stride(-2) if gate_up.dim() > 1 else 2 * width,
        width,
        CURVE=curve,
        BLOCK=block,
        **launch_options(gate_up.device, num_warps=4),
    )
    return out
