"""Sampling in one pass over the vocabulary: greedy and temperature sampling, and the last resort of `filters` for rows
that keep too many tokens to list.

The noise is that of `quire.sampling.noise`, bit for bit up to the logarithms, which are the hardware's approximation:
with exact ones, computing the noise would cost more than reading the logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import (
    INTERPRETED,
    compute_cache_keys,
    launch_options,
    let_next_start,
    num_multiprocessors,
    wait_for_inputs,
)
from quire.kernels.triton.sampling.logits import find_row, load_logits

# Constants of `quire.sampling.noise`, as the signed numbers that Triton needs; a test compares the two.
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
GOLDEN_32 = tl.constexpr(0x9E3779B1 - (1 << 32))
MULTIPLY_64_A = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
MULTIPLY_64_B = tl.constexpr(0x94D049BB133111EB - (1 << 64))
MULTIPLY_32_A = tl.constexpr(0x85EBCA6B - (1 << 32))
MULTIPLY_32_B = tl.constexpr(0xC2B2AE35 - (1 << 32))
TO_UNIT = tl.constexpr(2.0**-31 * (1 - 2.0**-24))
HALF_STEP = tl.constexpr(2.0**-32)

BLOCK = 2048
MAX_CHUNKS = 64


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """How far below its best logit each sample may choose; all [samples], written on the device by `filters`."""

    best: Tensor  # float32: subtracted from the logits; 0 where any constant will do
    limit: Tensor  # float32: tokens with (best - logit) * inv_temperature above it are excluded
    todo: Tensor  # int32: 0 for samples whose token has been chosen already


@triton.jit
def row_words(key, position):
    """The two 32-bit words with which a (key, position) pair seeds its row's noise."""
    x = key + position * GOLDEN
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * MULTIPLY_64_A
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * MULTIPLY_64_B
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return x.to(tl.int32), (x >> 32).to(tl.int32) | 1


@triton.jit
def noise_bits(token_ids, whiten, multiply):
    """31 bits of noise per token, from the words of `row_words`."""
    x = (token_ids * GOLDEN_32 ^ whiten) * multiply
    x = (x ^ (x >> 15)) * MULTIPLY_32_A
    x = (x ^ (x >> 13)) * MULTIPLY_32_B
    return x ^ (x >> 16)


@triton.jit
def log2_approx(x, FAST: tl.constexpr):
    """The hardware's approximate logarithm: error about 2**-22, which changes a choice only at near-ties."""
    if FAST:
        return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tl.log2(x)


@triton.jit
def add_gumbel(scores, u, FAST: tl.constexpr):
    """scores - log(-log(1 - u)) for u in [0, 1). Small u decide and keep all their bits, because for them the inner
    logarithm is a series. `fma` is explicit, because the compiler would contract in some kernels and not in others,
    whose results must be equal."""
    series = u * tl.fma(u, tl.fma(u, tl.fma(u, 0.25, 0.33333333), 0.5), 1.0)
    inner = tl.where(u < 0.015625, series, log2_approx(1.0 - u, FAST) * -0.6931471805599453)
    return tl.fma(log2_approx(HALF_STEP + inner, FAST), -0.6931471805599453, scores)


@triton.jit
def _choose_kernel(
    logits_ptr,
    key_ptr,
    positions_ptr,
    inv_temperature_ptr,
    mask_ptr,
    best_ptr,
    token_ptr,
    bad_ptr,
    copies_ptr,
    places_ptr,
    row_best_ptr,
    limit_ptr,
    todo_ptr,
    logits_stride,
    copies_stride,
    mask_stride,
    vocab_size,
    chunk_len,
    EDITED: tl.constexpr,
    LIMITED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one chunk of one row. Stores the best score, its token, and whether the chunk contains NaN or +inf.
    Each lane keeps its own best; lanes are compared once, at the end."""
    let_next_start(PDL)
    sample = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    wait_for_inputs(PDL)
    scale = tl.load(inv_temperature_ptr + sample)
    greedy = scale == 0.0
    scale = tl.where(greedy, 1.0, scale)
    whiten, multiply = row_words(tl.load(key_ptr + sample), tl.load(positions_ptr + sample))
    begin = chunk * chunk_len
    end = tl.minimum(begin + chunk_len, vocab_size)
    row = find_row(
        logits_ptr,
        logits_stride,
        copies_ptr,
        copies_stride,
        places_ptr,
        mask_ptr,
        mask_stride,
        sample,
        EDITED,
        HAS_MASK,
    )
    if LIMITED:
        row_best = tl.load(row_best_ptr + sample)
        lowest = -tl.load(limit_ptr + sample)
        end = tl.where(tl.load(todo_ptr + sample) != 0, end, begin)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    unfit = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(begin, end, BLOCK):
        token_ids = start + tl.arange(0, BLOCK)
        scores = load_logits(row, token_ids, token_ids < end, EDITED)
        is_unfit = (scores != scores) | (scores == float("inf"))
        unfit = unfit | is_unfit.to(tl.int32)
        scores = tl.where(is_unfit, float("-inf"), scores)
        if LIMITED:
            scores = (scores - row_best) * scale
            scores = tl.where(scores >= lowest, scores, float("-inf"))
        else:
            scores = scores * scale
        if HAS_MASK:
            words = tl.load(row[3] + token_ids // 32, mask=token_ids < end, other=0)
            scores = tl.where((words >> (token_ids % 32)) & 1 != 0, scores, float("-inf"))
        if not greedy:
            u = noise_bits(token_ids, whiten, multiply).to(tl.float32) * TO_UNIT
            scores = add_gumbel(scores, u, FAST)
        better = scores > best
        best = tl.where(better, scores, best)
        token = tl.where(better, token_ids, token)
    chunk_best = tl.max(best, 0)
    slot = sample * tl.num_programs(0) + chunk
    tl.store(best_ptr + slot, chunk_best)
    tl.store(token_ptr + slot, tl.min(tl.where(best == chunk_best, token, 0x7FFFFFFF), 0))
    tl.store(bad_ptr + slot, tl.max(unfit, 0))


@triton.jit(do_not_specialize=["num_chunks"])
def _finish_kernel(
    best_ptr,
    token_ptr,
    bad_ptr,
    out_token_ptr,
    out_bad_ptr,
    rows_ptr,
    row_tokens_ptr,
    computed_ptr,
    todo_ptr,
    row_tokens_stride,
    num_chunks,
    CHUNKS: tl.constexpr,
    APPEND: tl.constexpr,
    LIMITED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: combines the chunks of one sample, and stores its token and whether it is bad."""
    let_next_start(PDL)
    sample = tl.program_id(0)
    chunks = tl.arange(0, CHUNKS)
    there = chunks < num_chunks
    wait_for_inputs(PDL)
    place = sample * num_chunks + chunks
    scores = tl.load(best_ptr + place, mask=there, other=float("-inf"))
    tokens = tl.load(token_ptr + place, mask=there, other=0x7FFFFFFF)
    wrong = tl.max(tl.load(bad_ptr + place, mask=there, other=0), 0)
    best = tl.max(scores, 0)
    bad = (wrong > 0) | (best == float("-inf"))
    token = tl.where(bad, 0, tl.min(tl.where(scores == best, tokens, 0x7FFFFFFF), 0))
    todo = True
    if LIMITED:
        todo = tl.load(todo_ptr + sample) != 0
    tl.store(out_token_ptr + sample, token.to(tl.int64), mask=todo)
    tl.store(out_bad_ptr + sample, bad, mask=todo)
    if APPEND:
        row = tl.load(rows_ptr + sample)
        position = tl.load(computed_ptr + row, mask=row >= 0, other=0)
        tl.store(row_tokens_ptr + row * row_tokens_stride + position, token, mask=row >= 0)


def sample_rows(
    logits: Tensor,
    key: Tensor,
    positions: Tensor,
    inv_temperature: Tensor,
    *,
    mask: Tensor | None = None,
    append_to: tuple[Tensor, Tensor, Tensor] | None = None,
    edited: tuple[Tensor, Tensor] | None = None,
    limits: SamplingLimits | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose a token for each row of `logits` [samples, vocab] (any float type): the largest of logit * inv_temperature
    + noise of (key, position), or the largest logit where `inv_temperature` [samples] float32 is 0. `mask`: packed bits
    of allowed tokens, int32 [samples, ceil(vocab / 32)]. `append_to` (rows, row_tokens, computed): also store the token
    in its permanent row, at `computed`; rows below 0 are skipped. `edited` (copies, places): samples whose place is not
    negative are read from that row of the float32 copies instead. `limits`: which samples choose here, and how far
    below their best. Returns token ids [samples] int64 and bad flags [samples] bool (a NaN or +inf logit, or no token
    allowed; such a row gets token 0), in `out` if given."""
    num_samples, vocab_size = logits.shape
    device = logits.device
    wanted = triton.cdiv(8 * num_multiprocessors(device.index), num_samples)
    num_chunks = min(max(wanted, 1), MAX_CHUNKS, triton.cdiv(vocab_size, BLOCK))
    chunk_len = triton.cdiv(triton.cdiv(vocab_size, num_chunks), 32) * 32
    best = torch.empty(num_samples, num_chunks, dtype=torch.float32, device=device)
    tokens = torch.empty(num_samples, num_chunks, dtype=torch.int32, device=device)
    wrong = torch.empty_like(tokens)
    block = BLOCK if not INTERPRETED else min(BLOCK, triton.next_power_of_2(chunk_len))
    _choose_kernel[(num_chunks, num_samples)](
        logits,
        key,
        positions,
        inv_temperature,
        mask,
        best,
        tokens,
        wrong,
        *(edited or (None, None)),
        *((limits.best, limits.limit, limits.todo) if limits else (None, None, None)),
        logits.stride(0),
        edited[0].stride(0) if edited else 0,
        0 if mask is None else mask.stride(0),
        vocab_size,
        chunk_len,
        EDITED=edited is not None,
        LIMITED=limits is not None,
        HAS_MASK=mask is not None,
        BLOCK=block,
        FAST=not INTERPRETED,
        **launch_options(device, num_warps=4, num_stages=3),
    )
    if out is None:
        out = (
            torch.empty(num_samples, dtype=torch.int64, device=device),
            torch.empty(num_samples, dtype=torch.bool, device=device),
        )
    rows, row_tokens, computed = append_to or (None, None, None)
    _finish_kernel[(num_samples,)](
        best,
        tokens,
        wrong,
        *out,
        rows,
        row_tokens,
        computed,
        limits.todo if limits else None,
        0 if row_tokens is None else row_tokens.stride(0),
        num_chunks,
        CHUNKS=MAX_CHUNKS,
        APPEND=append_to is not None,
        LIMITED=limits is not None,
        **launch_options(device, num_warps=1),
    )
    return out


compute_cache_keys(globals())
