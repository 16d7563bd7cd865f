"""Products of a few tokens with one matrix per head: the projections of queries into latent space and of results back.

Bound by reading the matrices, so a program loads a block of one head's matrix before the preceding kernel has ended;
tokens are the rows of one product. With many tokens, torch's batched product is used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import dot_precision, launch_options, let_next_start, wait_for_inputs

MAX_TOKENS = 16
BLOCK_BYTES = 16384  # of a matrix, per program
MAX_INPUTS = 512


@triton.jit(do_not_specialize=["num_tokens"])
def _head_product_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_tokens,
    x_head_stride,
    x_stride,
    head_stride,
    in_stride,
    out_stride,
    num_heads,
    IN: tl.constexpr,
    IN_BLOCK: tl.constexpr,
    OUT: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: OUT_BLOCK outputs of one head for all tokens."""
    let_next_start(PDL)
    head = tl.program_id(0).to(tl.int64)
    outs = tl.program_id(1) * OUT_BLOCK + tl.arange(0, OUT_BLOCK)
    ins = tl.arange(0, IN_BLOCK)
    inside = (ins < IN)[:, None] & (outs < OUT)[None, :]
    place = head * head_stride + ins[:, None] * in_stride + outs[None, :] * out_stride
    weight = tl.load(weight_ptr + place, mask=inside, other=0.0)  # weights are not written by any kernel
    tokens = tl.arange(0, TOKENS)
    live = (tokens < num_tokens)[:, None]
    wait_for_inputs(PDL)
    source = x_ptr + head * x_head_stride + tokens[:, None].to(tl.int64) * x_stride + ins[None, :]
    x = tl.load(source, mask=live & (ins < IN)[None, :], other=0.0)
    out = tl.dot(x, weight, input_precision=PRECISION)
    target = out_ptr + (tokens[:, None] * num_heads + head) * OUT + outs[None, :]
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=live & (outs < OUT)[None, :])


def head_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [heads, tokens, in] times weight [heads, in, out] -> [heads, tokens, out]. With few tokens, the heads of a
    token are contiguous in memory."""
    num_heads, num_tokens, num_in = x.shape
    num_out = weight.shape[2]
    if num_tokens > MAX_TOKENS or num_in > MAX_INPUTS or x.stride(2) != 1:
        return torch.bmm(x, weight)
    out = x.new_empty(num_tokens, num_heads, num_out)
    in_block = max(16, triton.next_power_of_2(num_in))
    out_block = max(16, min(BLOCK_BYTES // x.element_size() // in_block, triton.next_power_of_2(num_out)))
    _head_product_kernel[(num_heads, triton.cdiv(num_out, out_block))](
        x,
        weight,
        out,
        num_tokens,
        x.stride(0),
        x.stride(1),
        *weight.stride(),
        num_heads,
        IN=num_in,
        IN_BLOCK=in_block,
        OUT=num_out,
        OUT_BLOCK=out_block,
        TOKENS=MAX_TOKENS,
        PRECISION=dot_precision(x.dtype),
        **launch_options(x.device, num_warps=4),
    )
    return out.transpose(0, 1)
