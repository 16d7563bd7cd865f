"""Edits of single logits before sampling; implements `quire.sampling.penalties` and `quire.sampling.edits`.

Only edited samples are copied, to float32, and edited there: the model's own logits are kept for logprobs, and bfloat16
would round away small edits. A penalty is applied once per distinct token of a history: two bits per token and row
record which occurrence came first, so nothing is sorted and no counts of [rows, vocab] are needed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import INTERPRETED, launch_options, let_next_start, wait_for_inputs

COPY_BLOCK = 4096
HISTORY_BLOCK = 1024
CELLS_BLOCK = 128


@triton.jit
def _copy_kernel(
    logits_ptr,
    samples_ptr,
    copies_ptr,
    logits_stride,
    copies_stride,
    vocab_size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: copies BLOCK logits of one sample."""
    let_next_start(PDL)
    place = tl.program_id(1).to(tl.int64)
    token_ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    sample = tl.load(samples_ptr + place)
    there = token_ids < vocab_size
    logits = tl.load(logits_ptr + sample * logits_stride + token_ids, mask=there)
    tl.store(copies_ptr + place * copies_stride + token_ids, logits.to(tl.float32), mask=there)


@triton.jit(do_not_specialize=["num_cells"])
def _bias_kernel(
    copies_ptr,
    places_ptr,
    cells_ptr,
    values_ptr,
    copies_stride,
    vocab_size,
    num_cells,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: adds BLOCK biases."""
    let_next_start(PDL)
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = lanes < num_cells
    wait_for_inputs(PDL)
    cells = tl.load(cells_ptr + lanes, mask=there, other=0)
    place = tl.load(places_ptr + cells // vocab_size, mask=there, other=0).to(tl.int64)
    values = tl.load(values_ptr + lanes, mask=there, other=0.0)
    tl.atomic_add(copies_ptr + place * copies_stride + cells % vocab_size, values, mask=there, sem="relaxed")


@triton.jit(do_not_specialize=["num_cells", "prefix_len"])
def _forbid_kernel(
    copies_ptr,
    places_ptr,
    cells_ptr,
    owners_ptr,
    lengths_ptr,
    until_ptr,
    prefixes_ptr,
    history_ptr,
    rows_ptr,
    copies_stride,
    vocab_size,
    num_cells,
    prefix_len,
    history_stride,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add -inf to cells (NaN stays NaN): where a row is shorter than its minimum length, or where it ends with the
    prefix of a bad word."""
    let_next_start(PDL)
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = lanes < num_cells
    wait_for_inputs(PDL)
    cells = tl.load(cells_ptr + lanes, mask=there, other=0)
    owners = tl.load(owners_ptr + lanes, mask=there, other=0)
    lengths = tl.load(lengths_ptr + owners, mask=there, other=0)
    if WORDS:
        matches = there
        row = tl.load(rows_ptr + owners, mask=there, other=0)
        for back in tl.range(0, prefix_len):
            wanted = tl.load(prefixes_ptr + lanes * prefix_len + back, mask=there, other=-1)
            at = lengths - prefix_len + back
            token = tl.load(history_ptr + row * history_stride + at, mask=there & (at >= 0), other=-1)
            matches = matches & ((wanted < 0) | ((token == wanted) & (at >= 0)))
    else:
        matches = there & (lengths < tl.load(until_ptr + lanes, mask=there, other=0))
    place = tl.load(places_ptr + cells // vocab_size, mask=there, other=0).to(tl.int64)
    address = copies_ptr + place * copies_stride + cells % vocab_size
    logits = tl.load(address, mask=matches, other=0.0)
    tl.store(address, logits + float("-inf"), mask=matches)


@triton.jit
def _first_seen(seen_ptr, tokens, there):
    """Which of these tokens occur for the first time in this row; marks all of them as seen."""
    bits = tl.full(tokens.shape, 1, tl.int32) << (tokens & 31)
    before = tl.atomic_or(seen_ptr + (tokens >> 5), bits, mask=there, sem="relaxed")
    return there & ((before & bits) == 0)


@triton.jit
def _penalties_kernel(
    copies_ptr,
    places_ptr,
    seen_ptr,
    samples_ptr,
    prompt_len_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    history_ptr,
    lengths_ptr,
    rows_ptr,
    copies_stride,
    history_stride,
    num_words,
    vocab_size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row. Repetition is complete before presence begins, and presence before frequency, so that every
    cell sees them in this order; frequency subtracts equal amounts, so the order among its steps does not matter."""
    let_next_start(PDL)
    index = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    sample = tl.load(samples_ptr + index)
    length = tl.load(lengths_ptr + sample).to(tl.int32)
    prompt_len = tl.load(prompt_len_ptr + index).to(tl.int32)
    repetition = tl.load(repetition_ptr + index)
    presence = tl.load(presence_ptr + index)
    frequency = tl.load(frequency_ptr + index)
    history = history_ptr + tl.load(rows_ptr + sample) * history_stride
    copy = copies_ptr + tl.load(places_ptr + sample).to(tl.int64) * copies_stride
    seen = seen_ptr + index * 2 * num_words
    if repetition != 1.0:
        for start in tl.range(0, length, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tokens = tl.load(history + at, mask=at < length, other=-1).to(tl.int32)
            first = _first_seen(seen, tokens, (at < length) & (tokens >= 0) & (tokens < vocab_size))
            logits = tl.load(copy + tokens, mask=first, other=0.0)
            logits = tl.where(
                logits > 0, tl.fdiv(logits, tl.zeros_like(logits) + repetition, ieee_rounding=True), logits * repetition
            )
            tl.store(copy + tokens, logits, mask=first)
    if presence != 0.0:
        tl.debug_barrier()
        for start in tl.range(prompt_len, length, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tokens = tl.load(history + at, mask=at < length, other=-1).to(tl.int32)
            first = _first_seen(seen + num_words, tokens, (at < length) & (tokens >= 0) & (tokens < vocab_size))
            logits = tl.load(copy + tokens, mask=first, other=0.0)
            tl.store(copy + tokens, logits - presence, mask=first)
    if frequency != 0.0:
        tl.debug_barrier()
        for start in tl.range(prompt_len, length, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tokens = tl.load(history + at, mask=at < length, other=-1).to(tl.int32)
            there = (at < length) & (tokens >= 0) & (tokens < vocab_size)
            tl.atomic_add(copy + tokens, tl.zeros([BLOCK], tl.float32) - frequency, mask=there, sem="relaxed")


def copy_samples(logits: Tensor, samples: Tensor) -> Tensor:
    """float32 copies [n, vocab] of the samples `samples` [n] of `logits` [samples, vocab], to be edited in place."""
    vocab_size = logits.shape[1]
    copies = torch.empty(len(samples), vocab_size, dtype=torch.float32, device=logits.device)
    _copy_kernel[(triton.cdiv(vocab_size, COPY_BLOCK), len(samples))](
        logits,
        samples,
        copies,
        logits.stride(0),
        copies.stride(0),
        vocab_size,
        BLOCK=COPY_BLOCK,
        **launch_options(logits.device, num_warps=4),
    )
    return copies


def add_bias(copies: Tensor, places: Tensor, cells: Tensor, values: Tensor) -> None:
    """Add `values` [n] to `cells` [n] (sample * vocab + token). `places` [samples] int32: index of a sample's copy."""
    _bias_kernel[(triton.cdiv(len(cells), CELLS_BLOCK),)](
        copies,
        places,
        cells,
        values,
        copies.stride(0),
        copies.shape[1],
        len(cells),
        BLOCK=CELLS_BLOCK,
        **launch_options(copies.device, num_warps=4),
    )


def forbid_stops(copies: Tensor, places: Tensor, cells: Tensor, owners: Tensor, until: Tensor, lengths: Tensor) -> None:
    """Forbid `cells` [n] where the sequence of their sample, `owners` [n], is shorter than `until` [n]."""
    _forbid_kernel[(triton.cdiv(len(cells), CELLS_BLOCK),)](
        copies,
        places,
        cells,
        owners,
        lengths,
        until,
        None,
        None,
        None,
        copies.stride(0),
        copies.shape[1],
        len(cells),
        0,
        0,
        WORDS=False,
        BLOCK=CELLS_BLOCK,
        **launch_options(copies.device, num_warps=4),
    )


def forbid_bad_words(
    copies: Tensor,
    places: Tensor,
    cells: Tensor,
    owners: Tensor,
    prefixes: Tensor,
    history: Tensor,
    lengths: Tensor,
    rows: Tensor,
) -> None:
    """Forbid `cells` [n] where the history of their sample, `owners` [n], ends with the prefix [n, longest]
    (right-aligned, -1 where shorter)."""
    _forbid_kernel[(triton.cdiv(len(cells), CELLS_BLOCK),)](
        copies,
        places,
        cells,
        owners,
        lengths,
        None,
        prefixes,
        history,
        rows,
        copies.stride(0),
        copies.shape[1],
        len(cells),
        prefixes.shape[1],
        history.stride(0),
        WORDS=True,
        BLOCK=CELLS_BLOCK,
        **launch_options(copies.device, num_warps=4),
    )


def apply_penalties(
    copies: Tensor,
    places: Tensor,
    samples: Tensor,
    prompt_len: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    history: Tensor,
    lengths: Tensor,
    rows: Tensor,
) -> None:
    """Apply the penalties of `samples` [n] over their `history` [max_rows, max_len]."""
    num_words = triton.cdiv(copies.shape[1], 32)
    seen = torch.zeros(len(samples), 2, num_words, dtype=torch.int32, device=copies.device)
    _penalties_kernel[(len(samples),)](
        copies,
        places,
        seen,
        samples,
        prompt_len,
        repetition,
        presence,
        frequency,
        history,
        lengths,
        rows,
        copies.stride(0),
        history.stride(0),
        num_words,
        copies.shape[1],
        BLOCK=HISTORY_BLOCK if not INTERPRETED else 32,
        **launch_options(copies.device, num_warps=8),
    )
