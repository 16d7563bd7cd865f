"""Access to a step's logits for the sampling kernels: float32 whatever their type, from the model or from an edited
copy, after the grammar's mask. Also searches for a cut without sorting.

Tokens come in groups of 32, which is also a word of a grammar's mask."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.launch import compute_cache_keys

GROUP = tl.constexpr(32)
INF_BITS = tl.constexpr(0x7F800000)


@triton.jit
def find_row(
    logits_ptr,
    logits_stride,
    copies_ptr,
    copies_stride,
    places_ptr,
    mask_ptr,
    mask_stride,
    sample,
    EDITED: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Pointers to one sample's logits, edited copy and mask, and whether it has a copy: the argument `row` of the
    functions below. Pointers to what does not exist are arbitrary and never read."""
    copy = logits_ptr
    has_copy = False
    mask = logits_ptr
    if EDITED:
        place = tl.load(places_ptr + sample).to(tl.int64)
        copy = copies_ptr + place * copies_stride
        has_copy = place >= 0
    if HAS_MASK:
        mask = mask_ptr + sample * mask_stride
    return logits_ptr + sample * logits_stride, copy, has_copy, mask


@triton.jit
def load_logits(row, token_ids, there, EDITED: tl.constexpr):
    """A row's logits as float32, -inf where not `there`: those of its copy if it has one, else the model's."""
    logits_ptr, copy_ptr, has_copy, _ = row
    if EDITED:
        if has_copy:
            logits = tl.load(copy_ptr + token_ids, mask=there, other=float("-inf"))
        else:
            logits = tl.load(logits_ptr + token_ids, mask=there, other=float("-inf")).to(tl.float32)
    else:
        logits = tl.load(logits_ptr + token_ids, mask=there, other=float("-inf")).to(tl.float32)
    return logits


@triton.jit
def load_groups(row, groups, listed, vocab_size, EDITED: tl.constexpr, HAS_MASK: tl.constexpr):
    """Logits of whole groups, [groups, 32], -inf where a token does not exist or is masked, and whether the group
    contains NaN or +inf, masked or not, [groups]."""
    token_ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logits = load_logits(row, token_ids, listed[:, None] & (token_ids < vocab_size), EDITED)
    unfit = tl.max(((logits != logits) | (logits == float("inf"))).to(tl.int32), 1)
    if HAS_MASK:
        words = tl.load(row[3] + groups, mask=listed & (groups * GROUP < vocab_size), other=0)
        allowed = (words[:, None] >> tl.arange(0, GROUP)[None, :]) & 1
        logits = tl.where(allowed != 0, logits, float("-inf"))
    return logits, unfit


@triton.jit
def load_distances(
    row, start, best, scale, vocab_size, EDITED: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr
):
    """Token ids from `start` on and their distances below the best, both [BLOCK]."""
    token_ids = start + tl.arange(0, BLOCK)
    there = token_ids < vocab_size
    logits = load_logits(row, token_ids, there, EDITED)
    if HAS_MASK:
        words = tl.load(row[3] + token_ids // GROUP, mask=there, other=0)
        logits = tl.where((words >> (token_ids % GROUP)) & 1 != 0, logits, float("-inf"))
    return token_ids, (best - logits) * scale


@triton.jit
def reach(distances, amounts, wanted):
    """The smallest distance within which the sum of `amounts` reaches `wanted` (amounts of 1 count cells), as the bits
    of a float: distances are not negative, so their bits have the same order. Above the bits of infinity if not
    reached."""
    keys = distances.to(tl.int32, bitcast=True)
    found = tl.full([], 0, tl.int32)
    for index in range(31):
        bit = tl.full([], 1 << 30, tl.int32) >> index
        amount = tl.sum(tl.where(keys <= found + (bit - 1), amounts, 0))
        found = tl.where(amount >= wanted, found, found + bit)
    return found


@triton.jit
def bits_to_distance(bits):
    """The distance with these bits; bits above infinity's become infinity."""
    return tl.minimum(bits, INF_BITS).to(tl.float32, bitcast=True)


compute_cache_keys(globals())
