"""Packed KV caches on Triton: the cache write and paged attention over entries of 8 and 4 bits.

The twins of `kernels.reference.packed_cache`, behind the same ops as float caches. The rotation by the Hadamard matrix
is a product in torch, around the kernels; one attention kernel serves decodes and prefills."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.angles import Angles
from quire.kernels.cache_forms import PackedPlane, side_bytes
from quire.kernels.reference.packed_cache import rotate as rotate_by_steps
from quire.kernels.triton.attention import rope_write
from quire.kernels.upload import send

ROUND = 12582912.0  # 1.5 * 2 ** 23: added and subtracted, it rounds to the nearest whole number, ties to even
MAX_QUERIES = 64  # queries of one program, over the heads that share a key


@functools.cache
def _hadamard(head_dim: int, device: torch.device) -> Tensor:
    return rotate_by_steps(torch.eye(head_dim)).to(device)


def rotate(x: Tensor) -> Tensor:
    """Multiplies the last dimension by the Hadamard matrix, in float32."""
    return x.float() @ _hadamard(x.shape[-1], x.device)


# ---------------------------------------------------------------------------------------------------------------------
# Writing


@triton.jit
def _store_upper_half(ptr, value):
    """Stores the nearest number that has only the upper 16 bits of a float, ties to even, and returns it."""
    bits = value.to(tl.int32, bitcast=True)
    half = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    half = tl.where(value != value, 0x7FC0, half)
    tl.store(ptr, (half & 255).to(tl.uint8))
    tl.store(ptr + 1, (half >> 8).to(tl.uint8))
    return (half << 16).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(scale):
    usable = (scale > 0) & (scale < float("inf"))
    return tl.where(usable, 1.0 / tl.where(usable, scale, 1.0), 0.0)


@triton.jit
def _store_side(source, out, BITS: tl.constexpr, D: tl.constexpr, DB: tl.constexpr, ROUND: tl.constexpr):
    """Rounds one key or value [D] at `source` to its bytes at `out`."""
    column = tl.arange(0, DB)
    x = tl.load(source + column, mask=column < D, other=0.0)
    if BITS == 8:
        scale = _store_upper_half(out + D, tl.max(tl.abs(x), 0) * (1.0 / 127.0) + tl.sum(x * 0.0, 0))
        number = (x * _inverse(scale) + ROUND) - ROUND
        number = tl.minimum(tl.maximum(number, -127.0), 127.0)
        tl.store(out + column, number.to(tl.int32).to(tl.uint8), mask=column < D)
    else:
        low = tl.min(tl.where(column < D, x, float("inf")), 0)
        high = tl.max(tl.where(column < D, x, float("-inf")), 0)
        least = _store_upper_half(out + D // 2 + 2, low + tl.sum(x * 0.0, 0))
        scale = _store_upper_half(out + D // 2, (high - least) * (1.0 / 15.0))
        inverse = _inverse(scale)
        place = tl.arange(0, DB // 2)  # of 32 columns, byte i holds columns i and 16 + i
        first = place // 16 * 32 + place % 16
        fits = place < D // 2
        a = (tl.load(source + first, mask=fits, other=0.0) - least) * inverse
        b = (tl.load(source + first + 16, mask=fits, other=0.0) - least) * inverse
        a = tl.minimum(tl.maximum((a + ROUND) - ROUND, 0.0), 15.0).to(tl.int32)
        b = tl.minimum(tl.maximum((b + ROUND) - ROUND, 0.0), 15.0).to(tl.int32)
        tl.store(out + place, (a | (b << 4)).to(tl.uint8), mask=fits)


@triton.jit
def _pack_entries_kernel(
    k_ptr,
    v_ptr,
    slots_ptr,
    entries_ptr,
    KV_HEADS: tl.constexpr,
    ENTRY: tl.constexpr,
    KEY_BYTES: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    D: tl.constexpr,
    DB: tl.constexpr,
    ROUND: tl.constexpr,
):
    """One program: the key and the value, rotated already, of one token and head. A slot below 0 is skipped."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        place = (token * KV_HEADS + head) * D
        out = entries_ptr + (slot * KV_HEADS + head) * ENTRY
        _store_side(k_ptr + place, out, KEY_BITS, D, DB, ROUND)
        _store_side(v_ptr + place, out + KEY_BYTES, VALUE_BITS, D, DB, ROUND)


def qk_norm_rope_write(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    angles: Angles,
    k_cache: PackedPlane,
    v_cache: PackedPlane,
    slots: Tensor,
    num_heads: int,
) -> Tensor:
    """The op of `rope_write` for a packed cache, whose pages are contiguous."""
    _, _, kv_heads, head_dim = k_cache.shape
    form, tokens = k_cache.form, len(qkv)
    both = qkv.new_empty(2, tokens, 1, kv_heads, head_dim)
    order = torch.arange(tokens, device=qkv.device)
    q = rope_write.qk_norm_rope_write(qkv, q_weight, k_weight, eps, angles, both[0], both[1], order, num_heads)
    k, v = rotate(both)
    _pack_entries_kernel[(tokens, kv_heads)](
        k,
        v,
        slots,
        k_cache.entries,
        KV_HEADS=kv_heads,
        ENTRY=form.entry_bytes(head_dim),
        KEY_BYTES=side_bytes(form.key_bits, head_dim),
        KEY_BITS=form.key_bits,
        VALUE_BITS=form.value_bits,
        D=head_dim,
        DB=triton.next_power_of_2(head_dim),
        ROUND=ROUND,
        num_warps=1,
    )
    return q


# ---------------------------------------------------------------------------------------------------------------------
# Attention


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """A step's rows in chunks of tokens, one program for each chunk and KV head."""

    page_table: Tensor  # [rows, max_pages] int32
    positions: Tensor  # [tokens] int64
    counts: list[int]
    window: int | None
    chunks: dict[int, Tensor]  # heads that share a key -> [chunks, 3] int32: row, first token, number of tokens

    def chunks_of(self, group: int) -> Tensor:
        if group not in self.chunks:
            most, found, first = max(1, MAX_QUERIES // group), [], 0
            for row, count in enumerate(self.counts):
                found += [(row, first + at, min(most, count - at)) for at in range(0, count, most)]
                first += count
            listed = torch.from_numpy(np.array(found, np.int32).reshape(-1, 3))
            self.chunks[group] = send(listed, self.page_table.device)
        return self.chunks[group]


def plan_attention(
    page_table: Tensor,
    positions: Tensor,
    counts: list[int],
    len_bounds: list[int],
    page_tokens: int,
    window: int | None,
    dtype: torch.dtype,
) -> PackedPlan:
    return PackedPlan(page_table.contiguous(), positions, counts, window, {})


@triton.jit
def _load_upper_half(ptr, mask):
    low = tl.load(ptr, mask=mask, other=0).to(tl.int32)
    high = tl.load(ptr + 1, mask=mask, other=0).to(tl.int32)
    return ((low | (high << 8)) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _load_numbers(ptrs, mask, BITS: tl.constexpr, D: tl.constexpr, DB: tl.constexpr):
    """Loads the numbers of keys or values that begin at `ptrs` [keys], as float32 [keys, DB]."""
    column = tl.arange(0, DB)
    inside = mask[:, None] & (column < D)[None, :]
    if BITS == 8:
        number = tl.load(ptrs[:, None] + column[None, :], mask=inside, other=0).to(tl.int32)
        return ((number << 24) >> 24).to(tl.float32)
    byte = column // 32 * 16 + column % 16
    number = tl.load(ptrs[:, None] + byte[None, :], mask=inside, other=0).to(tl.int32)
    return ((number >> (column % 32 // 16 * 4)[None, :]) & 15).to(tl.float32)


@triton.jit
def _packed_attention_kernel(
    q_ptr,
    entries_ptr,
    table_ptr,
    positions_ptr,
    chunks_ptr,
    sinks_ptr,
    out_ptr,
    scale,
    softcap,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ENTRY: tl.constexpr,
    KEY_BYTES: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    D: tl.constexpr,
    DB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: a chunk of a row's tokens, and the query heads of one KV head. Query m is head m % GROUP of token
    m // GROUP of the chunk. q and out: [tokens, heads, D] float32, both rotated."""
    chunk, kv_head = tl.program_id(0), tl.program_id(1)
    row = tl.load(chunks_ptr + 3 * chunk).to(tl.int64)
    first = tl.load(chunks_ptr + 3 * chunk + 1).to(tl.int64)
    count = tl.load(chunks_ptr + 3 * chunk + 2)
    m = tl.arange(0, BLOCK_M)
    column = tl.arange(0, DB)
    valid = m < count * GROUP
    token = first + m // GROUP
    head = kv_head * GROUP + m % GROUP
    position = tl.load(positions_ptr + token, mask=valid, other=0).to(tl.int32)
    place = (token * HEADS + head)[:, None] * D + column[None, :]
    inside = valid[:, None] & (column < D)[None, :]
    q = tl.load(q_ptr + place, mask=inside, other=0.0)
    q_sum = tl.sum(q, 1)
    stop = tl.max(tl.where(valid, position, 0), 0) + 1
    start = 0
    if WINDOW > 0:
        earliest = tl.min(tl.where(valid, position, 2147483647), 0)
        start = tl.maximum(earliest - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DB], tl.float32)
    for base in range(start, stop, BLOCK_N):
        key = base + tl.arange(0, BLOCK_N)
        here = key < stop
        page = tl.load(table_ptr + row * table_stride + key // PAGE, mask=here, other=0).to(tl.int64)
        entry = entries_ptr + ((page * PAGE + key % PAGE) * KV_HEADS + kv_head) * ENTRY
        k = _load_numbers(entry, here, KEY_BITS, D, DB)
        k_tail = entry + D * KEY_BITS // 8
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * _load_upper_half(k_tail, here)[None, :]
        if KEY_BITS == 4:
            scores += q_sum[:, None] * _load_upper_half(k_tail + 2, here)[None, :]
        scores = scores * scale
        if SOFTCAP:
            scores = (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0) * softcap
        seen = here[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        now = tl.maximum(most, tl.max(scores, 1))
        base_line = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp(scores - base_line[:, None])
        shrink = tl.exp(most - base_line)
        total = total * shrink + tl.sum(weights, 1)
        v = _load_numbers(entry + KEY_BYTES, here, VALUE_BITS, D, DB)
        v_tail = entry + KEY_BYTES + D * VALUE_BITS // 8
        weighted = weights * _load_upper_half(v_tail, here)[None, :]
        acc = acc * shrink[:, None] + tl.dot(weighted, v, input_precision="ieee")
        if VALUE_BITS == 4:
            acc += tl.sum(weights * _load_upper_half(v_tail + 2, here)[None, :], 1)[:, None]
        most = now
    if SINKS:
        total += tl.exp(tl.load(sinks_ptr + head, mask=valid, other=0.0).to(tl.float32) - most)
    tl.store(out_ptr + place, acc / tl.where(valid, total, 1.0)[:, None], mask=inside)


def paged_attention(
    q: Tensor,
    k_cache: PackedPlane,
    v_cache: PackedPlane,
    plan: PackedPlan,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The op of `paged` for a packed cache. q [tokens, heads, head_dim] -> [tokens, heads * head_dim]"""
    tokens, heads, head_dim = q.shape
    _, page_tokens, kv_heads, _ = k_cache.shape
    form, group = k_cache.form, heads // kv_heads
    turned = rotate(q).contiguous()
    out = torch.empty_like(turned)
    chunks = plan.chunks_of(group)
    queries = max(1, MAX_QUERIES // group) * group if max(plan.counts, default=1) > 1 else group
    _packed_attention_kernel[(len(chunks), kv_heads)](
        turned,
        k_cache.entries,
        plan.page_table,
        plan.positions,
        chunks,
        sinks,
        out,
        scale,
        softcap or 1.0,
        plan.page_table.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        GROUP=group,
        PAGE=page_tokens,
        WINDOW=plan.window or 0,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        ENTRY=form.entry_bytes(head_dim),
        KEY_BYTES=side_bytes(form.key_bits, head_dim),
        KEY_BITS=form.key_bits,
        VALUE_BITS=form.value_bits,
        D=head_dim,
        DB=triton.next_power_of_2(head_dim),
        BLOCK_M=max(16, triton.next_power_of_2(queries)),
        BLOCK_N=32,
        num_warps=4,
    )
    return rotate(out).to(q.dtype).view(tokens, heads * head_dim)
