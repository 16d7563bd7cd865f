"""Fused query/key RMSNorm, rotary embedding and KV cache write, between the fused QKV projection and attention.

Angles are computed from positions and frequencies, or read from tables in the layout of `reference.small_ops.rope`.
Values are cached unchanged, keys after norm and rope; an FP8 cache stores both divided by their scale."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.angles import Angles
from quire.kernels.triton.launch import INTERPRETED, launch_options, let_next_start, wait_for_inputs


@triton.jit
def cos_sin(angle, FAST: tl.constexpr):
    """Cosine and sine of `angle`. FAST: reduce to one turn and use the hardware approximation (error about 1e-6)."""
    if FAST:
        turns = tl.floor(angle * 0.15915494309189535 + 0.5)
        # 2 pi as a sum of two constants; the larger one has few bits, so that its multiples are exact.
        angle = tl.fma(turns, -0.0019353071795864769, tl.fma(turns, -6.28125, angle))
        cos = tl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [angle], tl.float32, is_pure=True, pack=1)
        sin = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [angle], tl.float32, is_pure=True, pack=1)
    else:
        cos = tl.cos(angle)
        sin = tl.sin(angle)
    return cos, sin


@triton.jit
def store_cache(ptr, value, mask, inv_scale, FP8: tl.constexpr):
    """Store cache entries; those of an FP8 cache are scaled and clamped to its range."""
    if FP8:
        value = tl.clamp(value * inv_scale, -448.0, 448.0)
    tl.store(ptr, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _qk_norm_rope_write_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    positions_ptr,
    frequencies_ptr,
    angle_scale,
    cos_ptr,
    sin_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    qkv_stride,
    cache_slot_stride,
    cache_head_stride,
    page_stride,
    inv_k_scale,
    inv_v_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    FROM_POSITIONS: tl.constexpr,
    FP8: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: HEADS query, key or value heads of one token. HALF_BLOCK: half of a head, rounded up to a power of
    two."""
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    Q_BLOCKS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_BLOCKS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    D: tl.constexpr = 2 * HALF
    is_q = block < Q_BLOCKS
    is_v = block >= Q_BLOCKS + KV_BLOCKS
    first = tl.where(is_q, block, tl.where(is_v, block - Q_BLOCKS - KV_BLOCKS, block - Q_BLOCKS)) * HEADS
    heads = first + tl.arange(0, HEADS)
    inside = heads < tl.where(is_q, NUM_HEADS, NUM_KV_HEADS)
    place = heads + tl.where(is_q, 0, NUM_HEADS + tl.where(is_v, NUM_KV_HEADS, 0))
    half = tl.arange(0, HALF_BLOCK)
    fits = half < HALF
    mask = inside[:, None] & fits[None, :]
    wait_for_inputs(PDL)
    source = qkv_ptr + token * qkv_stride + place[:, None] * D + half[None, :]
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    slot = tl.load(slots_ptr + token)
    # A slot is page * PAGE + offset. A row that pads the step has a negative slot and writes nothing.
    cache_row = (slot // PAGE) * page_stride + (slot % PAGE) * cache_slot_stride
    target = cache_row + heads[:, None] * cache_head_stride + half[None, :]
    cached = mask & (slot >= 0)
    if is_v:
        store_cache(v_cache_ptr + target, low, cached, inv_v_scale, FP8)
        store_cache(v_cache_ptr + target + HALF, high, cached, inv_v_scale, FP8)
    else:
        if NORM:
            weight_ptr = k_weight_ptr
            if is_q:
                weight_ptr = q_weight_ptr
            scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + eps)[:, None]
            low = low * scale * tl.load(weight_ptr + half, mask=fits, other=0.0).to(tl.float32)[None, :]
            high = high * scale * tl.load(weight_ptr + HALF + half, mask=fits, other=0.0).to(tl.float32)[None, :]
        if FROM_POSITIONS:
            position = tl.load(positions_ptr + token).to(tl.float32)
            angle = position * tl.load(frequencies_ptr + half, mask=fits, other=0.0)
            cos_low, sin_high = cos_sin(angle, FAST)
            cos_low = cos_low * angle_scale
            sin_high = sin_high * angle_scale
            cos_high = cos_low
            sin_low = -sin_high
        else:
            cos_low = tl.load(cos_ptr + token * D + half, mask=fits, other=0.0).to(tl.float32)
            cos_high = tl.load(cos_ptr + token * D + HALF + half, mask=fits, other=0.0).to(tl.float32)
            sin_low = tl.load(sin_ptr + token * D + half, mask=fits, other=0.0).to(tl.float32)
            sin_high = tl.load(sin_ptr + token * D + HALF + half, mask=fits, other=0.0).to(tl.float32)
        turned_low = low * cos_low[None, :] + high * sin_low[None, :]
        turned_high = high * cos_high[None, :] + low * sin_high[None, :]
        if is_q:
            out = q_ptr + (token * NUM_HEADS + heads[:, None]) * D + half[None, :]
            tl.store(out, turned_low.to(q_ptr.dtype.element_ty), mask=mask)
            tl.store(out + HALF, turned_high.to(q_ptr.dtype.element_ty), mask=mask)
        else:
            store_cache(k_cache_ptr + target, turned_low, cached, inv_k_scale, FP8)
            store_cache(k_cache_ptr + target + HALF, turned_high, cached, inv_k_scale, FP8)


def qk_norm_rope_write(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    angles: Angles,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    num_heads: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    heads_each: int | None = None,
) -> Tensor:
    """Normalize (unless both weights are None) and rotate the queries and keys of `qkv` [tokens, (heads + 2 kv_heads) *
    head_dim], write keys and values to their `slots` [tokens] int64 of the caches [pages, page_tokens, kv_heads,
    head_dim], and return the queries [tokens, heads, head_dim]. Slots below 0 are skipped. `heads_each`: heads per
    program, 2 or 8; chosen by the number of tokens when None.
    """
    num_kv_heads, head_dim = k_cache.shape[2], k_cache.shape[3]
    num_tokens = qkv.shape[0]
    q = qkv.new_empty(num_tokens, num_heads, head_dim)
    # With few tokens, programs of few heads are needed to occupy the whole GPU.
    heads = heads_each or (8 if num_tokens >= 64 else 2)
    from_positions = angles.positions is not None
    blocks = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    _qk_norm_rope_write_kernel[(num_tokens, blocks)](
        qkv,
        q_weight,
        k_weight,
        eps,
        angles.positions,
        angles.frequencies,
        angles.scale,
        angles.cos,
        angles.sin,
        q,
        k_cache,
        v_cache,
        slots,
        qkv.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        k_cache.stride(0),
        1.0 / k_scale,
        1.0 / v_scale,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
        HEADS=heads,
        PAGE=k_cache.shape[1],
        NORM=q_weight is not None,
        FROM_POSITIONS=from_positions,
        FP8=k_cache.dtype == torch.float8_e4m3fn,
        FAST=not INTERPRETED,
        **launch_options(qkv.device, num_warps=4 if heads == 8 else 1),
    )
    return q
