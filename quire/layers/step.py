"""One step as tensors: the whole input of a model's forward. `runtime` builds it from the device rows.

Layers and kernels read it and never write to it. It includes host-side integers, so that no shape has to be read back
from the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from quire.layers.adapters import AdapterPool
from quire.layers.taps import Taps


@dataclass(slots=True)
class PagedInputs:
    """The pages and slots of one paged cache group in this step."""

    page_table: Tensor  # [rows, max_pages] int32; entries past a row's pages are 0
    slots: Tensor  # [tokens] int64: page * page_tokens + offset of each new token's cache entry
    row_index: Tensor | None = None  # [rows] int64: index into `page_table` of each row; None: in order
    work: Any = None  # work lists of the attention kernels in a captured step; None: derived from `counts`


@dataclass(slots=True)
class StateInputs:
    """The slots of the recurrent state of each row. The slot of a row that starts at 0 holds zeros."""

    slots: Tensor  # [rows] int64


@dataclass(slots=True)
class Samples:
    """The sampled rows, for steps that only need the hidden states of sampled tokens."""

    rows: Tensor  # [samples] int64: indices into the step's rows
    len_bounds: list[int]  # host upper bounds of these rows' lengths


@dataclass(slots=True)
class Step:
    """One step's tokens, with the tokens of each row contiguous."""

    tokens: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    query_starts: Tensor  # [rows + 1] int32: row r has tokens query_starts[r] : query_starts[r + 1]
    seq_lens: Tensor  # [rows] int32: length of each row after this step
    logits_index: Tensor  # [samples] int64: tokens whose logits are sampled
    groups: dict[str, PagedInputs | StateInputs]
    counts: list[int] = field(default_factory=list)  # tokens per row, on the host; query_starts is their cumulative sum
    len_bounds: list[int] = field(default_factory=list)  # host upper bounds of seq_lens (exact without drafts)
    samples: Samples | None = None  # None: the hidden states of all tokens are needed
    adapters: AdapterPool | None = None  # with the step's route; None: no token uses an adapter
    taps: Taps | None = None  # layers whose hidden states the caller reads; see `Model.num_tapped_layers`
    stream: Tensor | None = None  # [tokens, width]: what the pipeline stage before this one left; None: the first stage

    def wanted(self, x: Tensor) -> Tensor:
        """Returns the rows of x [tokens, ...] that a model returns: all, or those of the sampled tokens."""
        return x if self.samples is None else x[self.logits_index]
