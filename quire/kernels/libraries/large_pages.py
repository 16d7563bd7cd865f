"""Copies of rows' pages in larger pages, for kernels that load whole blocks of keys at a time.

Keys and values are a few percent of the bytes and operations of a prompt's attention; pages of 16 tokens cost such a
kernel more than the copy. All layers of a step reuse the same buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.libraries.seam import PrefillRows
from quire.kernels.upload import upload

LARGE = 256  # tokens of a large page
MAX_TOKENS = 1 << 16  # tokens of one step: 2 x 128 MiB with 8 heads of 128


@dataclass(slots=True)
class LargePages:
    """Large pages of a step's prefill rows, and the list of pages to copy into them."""

    sources: Tensor  # [small pages] int32: pages to copy, in order
    table: Tensor  # [rows, large pages] int32
    k: Tensor  # [large pages, LARGE, kv_heads, head_dim]
    v: Tensor

    @classmethod
    def make(cls, rows: PrefillRows, k_cache: Tensor) -> LargePages:
        """List the copies of `rows` and allocate the large pages."""
        per_large = LARGE // rows.page_tokens
        counts = count_large_pages(rows.len_bounds)
        starts = np.cumsum(counts) - counts
        width = rows.page_table.shape[1]
        places = np.arange(int(counts.sum()) * per_large)
        owner = np.repeat(np.arange(len(counts)), counts * per_large)
        column = np.minimum(places - np.repeat(starts, counts * per_large) * per_large, width - 1)
        # Behind a row's end the copies contain arbitrary pages of its table: their keys are masked.
        table = starts[:, None] + np.minimum(np.arange(counts.max()), counts[:, None] - 1)
        parts = {"pages": {"places": owner * width + column, "table": table.astype(np.int32)}}
        sent = upload(parts, k_cache.device)["pages"]
        sources = rows.page_table.reshape(-1)[sent["places"]]
        k = k_cache.new_empty(int(counts.sum()), LARGE, *k_cache.shape[2:])
        return cls(sources, sent["table"], k, torch.empty_like(k))

    def fill(self, k_cache: Tensor, v_cache: Tensor) -> None:
        """Copy the rows' pages of one layer."""
        for cache, copy in ((k_cache, self.k), (v_cache, self.v)):
            torch.index_select(cache, 0, self.sources, out=copy.view(-1, *cache.shape[1:]))


def count_large_pages(len_bounds: list[int]) -> np.ndarray:
    """Number of large pages of each row."""
    counts: np.ndarray = -(-np.array(len_bounds, np.int64) // LARGE)
    return counts


def can_copy(rows: PrefillRows) -> bool:
    """Whether pages divide large ones evenly and the copies fit into MAX_TOKENS."""
    return LARGE % rows.page_tokens == 0 and int(count_large_pages(rows.len_bounds).sum()) * LARGE <= MAX_TOKENS
