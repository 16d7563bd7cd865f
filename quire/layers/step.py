"""One step as tensors: what a model's forward gets, and all it gets. Built by `runtime` from the device rows.

Layers and kernels read it; nobody writes it. Host-side integers ride along so that nothing has to wait for the
device to learn a shape.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class PagedInputs:
    """Where one paged group's bytes lie in this step."""

    page_table: Tensor  # [rows, max_pages] int32; entries past a row's pages are 0
    slots: Tensor  # [tokens] int64: page * page_tokens + offset, where each new token's entry is written
    row_index: Tensor | None = None  # [rows] int64: the row of `page_table` that is each row's; None: in order
    work: Any = None  # lists that the attention kernels of a captured step read; None: made from the counts below


@dataclass(slots=True)
class StateInputs:
    """Which slot holds each row's live state. A row whose start is 0 finds zeros there."""

    slots: Tensor  # [rows] int64


@dataclass(slots=True)
class Samples:
    """The rows that are sampled, for steps in which nothing but their last tokens' hidden states is wanted."""

    rows: Tensor  # [samples] int64: places in the step's rows
    len_bounds: list[int]  # of those rows


@dataclass(slots=True)
class Step:
    tokens: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    query_starts: Tensor  # [rows + 1] int32: row r's tokens are query_starts[r] : query_starts[r + 1]
    seq_lens: Tensor  # [rows] int32: length of each row once this step is done
    logits_index: Tensor  # [samples] int64: tokens whose hidden state is sampled from
    groups: dict[str, PagedInputs | StateInputs]
    counts: list[int] = field(default_factory=list)  # host copy: tokens per row, so query_starts is its running sum
    len_bounds: list[int] = field(default_factory=list)  # host upper bounds of seq_lens (exact without drafts)
    samples: Samples | None = None  # None: every token's hidden state is wanted

    def wanted(self, x: Tensor) -> Tensor:
        """Of x [tokens, ...], what a model gives back: the tokens that are sampled, where only those are wanted."""
        return x if self.samples is None else x[self.logits_index]
