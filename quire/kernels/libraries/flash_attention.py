"""FlashAttention for prefill rows: version 3 (module `flash_attn_interface`, Hopper) and 2 (`flash_attn`).

Version 3 reads pages of any size, but its faster loads need large ones, so there is a variant that copies first, and
`choose` times both. Version 2 supports pages of multiples of 256 tokens only; other caches are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.kernels.libraries.large_pages import LARGE, LargePages, can_copy
from quire.kernels.libraries.seam import PrefillRows

MAX_HEAD_DIM = 256


@dataclass(slots=True)
class _FlashPlan:
    """Page table and copies of a step's prefill rows, shared by all layers."""

    rows: PrefillRows
    table: Tensor  # [rows, pages] int32
    copies: LargePages | None
    scale: float

    @property
    def window(self) -> tuple[int, int]:
        """Number of keys to the left and to the right that a query sees besides its own."""
        return (-1, -1) if self.rows.window is None else (self.rows.window - 1, 0)

    def caches(self, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
        """The caches that the library reads: the model's own, or copies filled now."""
        if self.copies is None:
            return k_cache, v_cache
        self.copies.fill(k_cache, v_cache)
        return self.copies.k, self.copies.v


def _fits(q: Tensor, k_cache: Tensor) -> bool:
    head_dim = q.shape[2]
    return q.dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= MAX_HEAD_DIM


def _plan(rows: PrefillRows, k_cache: Tensor, scale: float, copied: bool) -> _FlashPlan:
    if copied:
        copies = LargePages.make(rows, k_cache)
        return _FlashPlan(rows, copies.table, copies, scale)
    # As wide as the longest row: the library splits work by the table's width.
    num_pages = -(-max(rows.len_bounds) // rows.page_tokens)
    return _FlashPlan(rows, rows.page_table[:, :num_pages], None, scale)


class FlashAttention3:
    """A `PrefillKernel` on FlashAttention-3, over the model's pages or copied ones."""

    def __init__(self, attend: Callable[..., Tensor], *, copied: bool):
        """`attend`: the library's `flash_attn_with_kvcache`."""
        self.name = "FlashAttention-3 over copied pages" if copied else "FlashAttention-3"
        self._attend, self._copied = attend, copied

    def fits(self, q: Tensor, k_cache: Tensor, rows: PrefillRows) -> bool:
        return _fits(q, k_cache) and (not self._copied or can_copy(rows))

    def plan(self, rows: PrefillRows, q: Tensor, k_cache: Tensor, scale: float) -> _FlashPlan:
        return _plan(rows, k_cache, scale, self._copied)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, planned: _FlashPlan) -> Tensor:
        rows = planned.rows
        k, v = planned.caches(k_cache, v_cache)
        out: Any = self._attend(
            q,
            k,
            v,
            cache_seqlens=rows.seq_lens,
            page_table=planned.table,
            cu_seqlens_q=rows.query_starts,
            max_seqlen_q=max(rows.counts),
            softmax_scale=planned.scale,
            causal=True,
            window_size=planned.window,
        )
        return out[0] if isinstance(out, tuple) else out  # some versions also return the softmax statistics


class FlashAttention2:
    """A `PrefillKernel` on FlashAttention-2."""

    def __init__(self, attend: Callable[..., Tensor]):
        """`attend`: the library's `flash_attn_varlen_func`."""
        self.name = "FlashAttention-2"
        self._attend = attend

    def fits(self, q: Tensor, k_cache: Tensor, rows: PrefillRows) -> bool:
        return _fits(q, k_cache) and (rows.page_tokens % LARGE == 0 or can_copy(rows))

    def plan(self, rows: PrefillRows, q: Tensor, k_cache: Tensor, scale: float) -> tuple[_FlashPlan, Tensor]:
        key_starts = torch.nn.functional.pad(rows.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        return _plan(rows, k_cache, scale, copied=rows.page_tokens % LARGE != 0), key_starts

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, planned: tuple[_FlashPlan, Tensor]) -> Tensor:
        step, key_starts = planned
        k, v = step.caches(k_cache, v_cache)
        return self._attend(
            q,
            k,
            v,
            cu_seqlens_q=step.rows.query_starts,
            cu_seqlens_k=key_starts,
            max_seqlen_q=max(step.rows.counts),
            max_seqlen_k=max(step.rows.len_bounds),
            softmax_scale=step.scale,
            causal=True,
            window_size=step.window,
            block_table=step.table,
        )


def open_version_3(device: torch.device) -> list[FlashAttention3]:
    """Both variants of FlashAttention-3's kernel, or an empty list if the device is not Hopper."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        return []
    from flash_attn_interface import flash_attn_with_kvcache

    return [FlashAttention3(flash_attn_with_kvcache, copied=copied) for copied in (False, True)]


def open_version_2(device: torch.device) -> list[FlashAttention2]:
    """FlashAttention-2's kernel, or an empty list on devices before Ampere."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return []
    from flash_attn import flash_attn_varlen_func

    return [FlashAttention2(flash_attn_varlen_func)]
