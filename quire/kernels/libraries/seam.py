"""Interface for attention kernels of libraries: prefill rows, in steps that are launched kernel by kernel.

`with_library` puts such a kernel before a device's own row of the ops table. Decode rows, captured steps and whatever
the library does not support stay with that row: its decode kernels are faster, and a graph cannot plan on the host.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.kernels.table import Ops
from quire.kernels.upload import Arrays, upload


@dataclass(frozen=True)
class PrefillRows:
    """Consecutive rows of a step, from the first prefill row on. Rows of one token may be among them."""

    counts: list[int]  # tokens of each row
    len_bounds: list[int]  # bounds of `seq_lens` known to the host; exact unless a row drafts
    page_table: Tensor  # [rows, max_pages] int32
    page_tokens: int
    window: int | None
    positions: Tensor  # [tokens] int64

    @cached_property
    def _sent(self) -> dict[str, Tensor]:
        """Uploaded lazily: whether a kernel fits is usually decided by what the host knows."""
        starts = np.array(list(itertools.accumulate(self.counts, initial=0)), np.int64)
        places: Arrays = {"starts": starts.astype(np.int32), "last": starts[1:] - 1}
        return upload({"rows": places}, self.positions.device)["rows"]

    @property
    def query_starts(self) -> Tensor:
        """[rows + 1] int32: first token of each row, and the number of tokens."""
        return self._sent["starts"]

    @cached_property
    def seq_lens(self) -> Tensor:
        """[rows] int32: length of each row once the step is done."""
        return (self.positions[self._sent["last"]] + 1).to(torch.int32)


class PrefillKernel(Protocol):
    """A library's causal attention of ragged rows over paged caches, [pages, page_tokens, kv_heads, head_dim] each."""

    name: str

    def fits(self, q: Tensor, k_cache: Tensor, rows: PrefillRows) -> bool:
        """Whether the kernel supports these rows; softcap, sinks and another cache type than q's are excluded
        already."""

    def plan(self, rows: PrefillRows, q: Tensor, k_cache: Tensor, scale: float) -> Any:
        """Prepare what all layers of a step share; called by the first of them."""

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, planned: Any) -> Tensor:
        """Attend q [tokens, heads, head_dim]; returns the same shape."""


def with_library(ops: Ops, kernel: PrefillKernel) -> Ops:
    """Return `ops` with the library's kernel for prefill rows before its own attention."""
    row = _LibraryRow(ops, kernel)
    return replace(ops, plan_attention=row.plan_attention, paged_attention=row.paged_attention)


class LibraryPlan:
    """Plan of a step with prefill rows. Which kernel attends for them is decided when the first layer runs."""

    def __init__(
        self,
        plan: Any,
        page_table: Tensor,
        positions: Tensor,
        counts: list[int],
        len_bounds: list[int],
        page_tokens: int,
        window: int | None,
        dtype: torch.dtype,
    ):
        """`plan`: the inner row's `plan_attention`."""
        self._plan, self._table, self._positions = plan, page_table, positions
        self._counts, self._len_bounds = counts, len_bounds
        self._rest = (page_tokens, window, dtype)
        # Decode rows come first in a step, so few rows of one token follow the first prefill row.
        self.first_row = next(row for row, count in enumerate(counts) if count > 1)
        self.first_token = self.first_row  # each row before it has one token
        self.fits: bool | None = None  # whether the library fits; None: not decided yet
        self.planned: Any = None  # what the library's kernel has prepared

    @cached_property
    def whole(self) -> Any:
        """The inner row's plan for all rows, for when the library does not fit."""
        return self._plan(self._table, self._positions, self._counts, self._len_bounds, *self._rest)

    @cached_property
    def decodes(self) -> Any:
        """The inner row's plan for the rows before the first prefill row."""
        end = self.first_row
        return self._plan(
            self._table[:end], self._positions[:end], self._counts[:end], self._len_bounds[:end], *self._rest
        )

    @cached_property
    def prefills(self) -> PrefillRows:
        """The rows from the first prefill row on."""
        page_tokens, window, _ = self._rest
        first = self.first_row
        counts, len_bounds, table = self._counts[first:], self._len_bounds[first:], self._table[first:]
        return PrefillRows(counts, len_bounds, table, page_tokens, window, self._positions[self.first_token :])


class _LibraryRow:
    """The inner row's two attention functions, with a library's kernel before them."""

    def __init__(self, inner: Ops, kernel: PrefillKernel):
        self._inner, self._kernel = inner, kernel

    def plan_attention(
        self,
        page_table: Tensor,
        positions: Tensor,
        counts: list[int],
        len_bounds: list[int],
        page_tokens: int,
        window: int | None,
        dtype: torch.dtype,
        **captured: Any,
    ) -> Any:
        if captured or all(count == 1 for count in counts):
            return self._inner.plan_attention(
                page_table, positions, counts, len_bounds, page_tokens, window, dtype, **captured
            )
        inner = self._inner.plan_attention
        return LibraryPlan(inner, page_table, positions, counts, len_bounds, page_tokens, window, dtype)

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: Any,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        **scales: Any,
    ) -> Tensor:
        inner = self._inner.paged_attention
        if not isinstance(plan, LibraryPlan):
            return inner(q, k_cache, v_cache, plan, scale, softcap, sinks, **scales)
        if plan.fits is None:
            plain = softcap is None and sinks is None and not scales and q.dtype == k_cache.dtype
            plan.fits = plain and self._kernel.fits(q, k_cache, plan.prefills)
        if not plan.fits:
            return inner(q, k_cache, v_cache, plan.whole, scale, softcap, sinks, **scales)
        first = plan.first_token
        if plan.planned is None:
            plan.planned = self._kernel.plan(plan.prefills, q[first:], k_cache, scale)
        attended = self._kernel.attend(q[first:], k_cache, v_cache, plan.planned).flatten(1)
        if not first:
            return attended
        return torch.cat((inner(q[:first], k_cache, v_cache, plan.decodes, scale), attended))
