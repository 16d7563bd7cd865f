"""Data exchanged between scheduler and runtime: cache specs, the plan of a step, and its output.

The scheduler writes a `Plan`; the runtime executes it and returns a `StepOutput`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import msgspec

from quire.types.params import SamplingParams

# Token counts of mixed steps that suit the device: whole tiles of its matrix units. The engine's chunking aims for
# them, and the runtime captures CUDA graphs of them.
STEP_SIZES = (32, 64, *range(128, 2049, 128))


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """A group of layers whose state has one layout. A model declares one spec per group.

    `paged` state (a KV cache) can be cut at any token: [layers, planes, pages, page_tokens, *shape].
    `state` (recurrent) exists at one length only: [layers, slots, *shape].
    """

    group: str
    kind: Literal["paged", "state"]
    layers: tuple[int, ...]
    shape: tuple[int, ...]  # of one token in one plane (paged), or of one layer's whole state (state)
    dtype: str
    planes: int = 2  # keys and values; 1 for a latent
    page_tokens: int = 16  # one number per model
    window: int | None = None  # sliding window: a token attends to itself and the window - 1 tokens before it
    snapshot_tokens: int = 1024  # state: interval between snapshots

    @property
    def unit_elements(self) -> int:
        """Number of elements of one page (paged) or one slot (state) over all layers."""
        per = math.prod(self.shape) * len(self.layers)
        return per * self.planes * self.page_tokens if self.kind == "paged" else per


# ---------------------------------------------------------------------------------------------------------------------
# The plan of a step: all that a rank needs to run it, and the only way the scheduler changes state on the device.


class PlanRow(msgspec.Struct, gc=False):
    """The tokens of one request that a step computes."""

    request_id: str
    row: int
    start: int  # upper bound; the device row holds the true length
    count: int
    num_drafts: int
    wants_sample: bool


@dataclass(slots=True)
class RowInit:
    """A request that enters a row, with everything the device needs to run it."""

    request_id: str
    row: int
    tokens: Sequence[int]
    prompt_len: int
    computed: int
    params: SamplingParams
    stop_ids: tuple[int, ...]
    seed: int
    sample_index: int


@dataclass(slots=True)
class PageWrite:
    """An update of a row's page table."""

    group: int  # index into the model's cache specs
    row: int
    first: int  # index of the first entry written in the row's page table
    pages: list[int]


class CopyKind(str, Enum):
    """The direction of a copy."""

    DEVICE = "device"  # page to page, slot to slot (copy-on-write, snapshots)
    OUT = "out"  # device to host
    IN = "in"  # host to device
    ZERO = "zero"  # clear a state slot


@dataclass(slots=True)
class Copy:
    """A copy of one unit within a group."""

    kind: CopyKind
    group: int
    source: int
    target: int


@dataclass(slots=True)
class Plan:
    """One step: the rows to compute, and the changes of rows, page tables and cache units that go with it."""

    step: int
    rows: list[PlanRow] = field(default_factory=list)
    added: list[RowInit] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    page_writes: list[PageWrite] = field(default_factory=list)  # in state groups `pages` holds the live slot
    copies: list[Copy] = field(default_factory=list)  # executed before the forward pass, in order
    snapshots: list[Copy] = field(default_factory=list)  # executed after the forward pass
    may_mask: bool = False  # some row may have a grammar, so sampling waits for the masks

    @property
    def num_tokens(self) -> int:
        return sum(r.count for r in self.rows)


# ---------------------------------------------------------------------------------------------------------------------
# The output of a step


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probability and rank of one token, and the most likely alternatives at its position, best first."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class StepOutput:
    """Results per plan row, in plan order; `tokens[i]` is empty if row i did not sample."""

    step: int
    tokens: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # plan index -> one per token
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # plan index -> one per prompt token
    drafts: dict[int, list[int]] = field(default_factory=dict)
    pooled: dict[int, list[float]] = field(default_factory=dict)  # plan index -> pooled hidden states of the prompt
    bad_rows: list[int] = field(default_factory=list)  # plan indices of rows for which no token could be sampled
