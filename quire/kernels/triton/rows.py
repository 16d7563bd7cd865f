"""Step inputs from permanent rows on the device, and sampled tokens back into them: twins of `runtime.rows`.

For steps of one token a row. Everything is read from and written to fixed addresses, so both ends can be captured.
A row number below 0 pads the step to a captured size: it computes token 0 at position -1 and leaves no trace.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import launch_options, let_next_start, wait_for_inputs


@triton.jit
def _gather_kernel(rows_ptr, row_tokens_ptr, computed_ptr, tokens_ptr, positions_ptr, seq_lens_ptr, row_tokens_stride,
                   ADVANCE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
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
    if ADVANCE:
        tl.store(computed_ptr + row, position + 1, mask=live)


@triton.jit
def _gather_pages_kernel(rows_ptr, positions_ptr, table_ptr, slots_ptr, out_table_ptr, table_stride, out_stride,
                         PAGE: tl.constexpr, COPY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    let_next_start(PDL)
    place = tl.program_id(0)
    wait_for_inputs(PDL)
    row = tl.load(rows_ptr + place)
    position = tl.load(positions_ptr + place)
    live = row >= 0
    page = tl.load(table_ptr + row * table_stride + position // PAGE, mask=live, other=0).to(tl.int64)
    tl.store(slots_ptr + place, tl.where(live, page * PAGE + position % PAGE, -1))
    if COPY:
        num_pages = tl.where(live, position // PAGE + 1, 0).to(tl.int32)
        for start in range(0, num_pages, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            pages = tl.load(table_ptr + row * table_stride + columns, mask=columns < num_pages, other=0)
            tl.store(out_table_ptr + place.to(tl.int64) * out_stride + columns, pages, mask=columns < num_pages)


@triton.jit
def _append_kernel(rows_ptr, sampled_ptr, row_tokens_ptr, computed_ptr, row_tokens_stride, PDL: tl.constexpr):
    let_next_start(PDL)
    place = tl.program_id(0)
    wait_for_inputs(PDL)
    row = tl.load(rows_ptr + place)
    live = row >= 0
    position = tl.load(computed_ptr + row, mask=live, other=0)
    token = tl.load(sampled_ptr + place).to(row_tokens_ptr.dtype.element_ty)
    tl.store(row_tokens_ptr + row * row_tokens_stride + position, token, mask=live)


def gather_tokens(rows: Tensor, row_tokens: Tensor, computed: Tensor, tokens: Tensor, positions: Tensor,
                  seq_lens: Tensor, advance: bool = True) -> None:  # fmt: skip
    """For each of `rows` [n] int64, its next token: fills `tokens` and `positions` [n] int64 and `seq_lens` [n] int32
    from `row_tokens` [max_rows, max_len] int32 and `computed` [max_rows] int64, which is advanced by one if asked."""
    _gather_kernel[(rows.shape[0],)](
        rows, row_tokens, computed, tokens, positions, seq_lens, row_tokens.stride(0), ADVANCE=advance,
        **launch_options(rows.device, num_warps=1),
    )  # fmt: skip


def gather_pages(rows: Tensor, positions: Tensor, table: Tensor, page_tokens: int, slots: Tensor,
                 page_table: Tensor | None) -> None:  # fmt: skip
    """For each of `rows`, the slot its token at `positions` goes to, into `slots` [n] int64 (-1 for padding), from the
    permanent `table` [max_rows, max_pages] int32; and the pages up to it into `page_table` [n, max_pages], if given."""
    _gather_pages_kernel[(rows.shape[0],)](
        rows, positions, table, slots, page_table, table.stride(0), 0 if page_table is None else page_table.stride(0),
        PAGE=page_tokens, COPY=page_table is not None, BLOCK=128, **launch_options(rows.device, num_warps=1),
    )  # fmt: skip


def append_tokens(rows: Tensor, sampled: Tensor, row_tokens: Tensor, computed: Tensor) -> None:
    """Each sampled token [n] becomes the next of its row, where `computed` says. Rows below 0 are skipped."""
    _append_kernel[(rows.shape[0],)](
        rows, sampled, row_tokens, computed, row_tokens.stride(0), **launch_options(rows.device, num_warps=1)
    )
