"""Prefill attention for Hopper: launches `prefill_hopper_kernel`, for heads of 128 in bfloat16 or float16."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.triton.attention.prefill import PrefillTuning
from quire.kernels.triton.attention.prefill_hopper_kernel import _prefill_hopper_kernel
from quire.kernels.triton.attention.prefill_split import BLOCK, LANES, RECORD, SharePartials

HALF = 64  # elements per half of a head: 64 fill the 128 bytes of shared memory's swizzle
STAGES = 2
TUNING = PrefillTuning(block_q=LANES, block=BLOCK)


def supports(q: Tensor, k_cache: Tensor, plain: bool) -> bool:
    """Whether this kernel supports the shapes (`plain`: no softcap, no sinks); else use `prefill.prefill_attention`."""
    return (
        q.dtype == k_cache.dtype
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] == 128
        and k_cache.shape[1] in (8, 16, 32, 64, 128)
        and k_cache.is_contiguous()
        and plain
        and k_cache.numel() // 128 < 2**31
    )


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    positions: Tensor,
    items: Tensor,
    programs: int,
    scale: float,
    *,
    partials: SharePartials | None = None,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend as `prefill.prefill_attention`. `items` (int32): tiles of `TUNING` distributed over `programs` by
    `prefill_split`. Results of cut tiles are left in `partials`, for `prefill_split.merge_shares`."""
    num_pages, page, num_kv_heads, head_dim = k_cache.shape
    group = q.shape[1] // num_kv_heads
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1] * head_dim)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    shape, strides = [num_pages * page, num_kv_heads * head_dim], [num_kv_heads * head_dim, 1]
    k_desc = TensorDescriptor(k_cache, shape, strides, [page, HALF], layout)
    v_desc = TensorDescriptor(v_cache, shape, strides, [page, HALF], layout)
    _prefill_hopper_kernel[(programs,)](
        q,
        k_desc,
        v_desc,
        out,
        partials and partials.sums,
        partials and partials.stats,
        page_table,
        positions,
        items,
        q.stride(0),
        page_table.stride(0),
        scale * 1.4426950408889634,
        window or 0,
        num_kv_heads,
        GROUP=group,
        GROUP_STORED=triton.next_power_of_2(group),
        PAGE=page,
        BLOCK=BLOCK,
        STAGES=STAGES,
        WINDOW=window is not None,
        RECORD=RECORD,
        num_warps=4,
    )
    return out
