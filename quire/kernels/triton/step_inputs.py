"""Step inputs gathered from permanent rows on the device, for decode-only steps; counterpart of `runtime.rows`.

All permanent tensors have fixed addresses, so the launches can be captured. A row number below 0 pads the step to a
captured size: it computes token 0 at position -1 and changes no state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import launch_options, let_next_start, wait_for_inputs


@triton.jit
def _gather_kernel(
    rows_ptr,
    row_tokens_ptr,
    computed_ptr,
    keys_ptr,
    scales_ptr,
    tokens_ptr,
    positions_ptr,
    seq_lens_ptr,
    lengths_ptr,
    out_keys_ptr,
    out_scales_ptr,
    row_tokens_stride,
    PDL: tl.constexpr,
):
    """One program: gathers the inputs of one row and advances its length."""
    let_next_start(PDL)
    place = tl.program_id(0)
    wait_for_inputs(PDL)
    row = tl.load(rows_ptr + place)
    live = row >= 0
    position = tl.load(computed_ptr + row, mask=live, other=-1)
    token = tl.load(row_tokens_ptr + row * row_tokens_stride + position, mask=live, other=0)
    tl.store(tokens_ptr + place, token.to(tl.int64))
    tl.store(positions_ptr + place, position)
    tl.store(seq_lens_ptr + place, (position + 1).to(tl.int32))
    tl.store(lengths_ptr + place, position + 1)
    tl.store(out_keys_ptr + place, tl.load(keys_ptr + row, mask=live, other=0))
    tl.store(out_scales_ptr + place, tl.load(scales_ptr + row, mask=live, other=0.0))
    tl.store(computed_ptr + row, position + 1, mask=live)


@triton.jit
def _slots_kernel(rows_ptr, positions_ptr, table_ptr, slots_ptr, table_stride, PAGE: tl.constexpr, PDL: tl.constexpr):
    """One program: computes the cache slot of one row's token."""
    let_next_start(PDL)
    place = tl.program_id(0)
    wait_for_inputs(PDL)
    row = tl.load(rows_ptr + place)
    position = tl.load(positions_ptr + place)
    live = row >= 0
    page = tl.load(table_ptr + row * table_stride + position // PAGE, mask=live, other=0).to(tl.int64)
    tl.store(slots_ptr + place, tl.where(live, page * PAGE + position % PAGE, -1))


@dataclass(frozen=True, slots=True)
class RowInputs:
    """Gathered inputs of a step with one token per row: [n] each."""

    tokens: Tensor  # int64
    positions: Tensor  # int64, -1 for padding
    seq_lens: Tensor  # int32
    lengths: Tensor  # int64: tokens up to and including this one
    keys: Tensor  # int64: seeds of the noise
    scales: Tensor  # float32: inverse temperatures, 0 for greedy


def gather_rows(rows: Tensor, row_tokens: Tensor, computed: Tensor, keys: Tensor, scales: Tensor) -> RowInputs:
    """Gather the next token of each of `rows` [n] int64 from `row_tokens` [max_rows, max_len] int32 at `computed`
    [max_rows] int64, which is incremented, and the sampling inputs `keys` and `scales` [max_rows]."""
    num_rows, device = rows.shape[0], rows.device
    stride = num_rows + num_rows % 2  # each begins at a multiple of 16 bytes: Triton specializes kernels on alignment
    tokens, positions, lengths, out_keys = torch.empty(4, stride, dtype=torch.int64, device=device)[:, :num_rows]
    seq_lens = torch.empty(num_rows, dtype=torch.int32, device=device)
    out_scales = torch.empty(num_rows, dtype=torch.float32, device=device)
    _gather_kernel[(num_rows,)](
        rows,
        row_tokens,
        computed,
        keys,
        scales,
        tokens,
        positions,
        seq_lens,
        lengths,
        out_keys,
        out_scales,
        row_tokens.stride(0),
        **launch_options(device, num_warps=1),
    )
    return RowInputs(tokens, positions, seq_lens, lengths, out_keys, out_scales)


def gather_slots(rows: Tensor, positions: Tensor, table: Tensor, page_tokens: int) -> Tensor:
    """Slots of the tokens of `rows` at `positions`, [n] int64 (-1 for padding), from the permanent page table `table`
    [max_rows, max_pages] int32."""
    slots = torch.empty_like(rows)
    _slots_kernel[(rows.shape[0],)](
        rows, positions, table, slots, table.stride(0), PAGE=page_tokens, **launch_options(rows.device, num_warps=1)
    )
    return slots
