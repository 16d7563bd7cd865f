"""What passes between the host and the device: what a model keeps, what a step does, and what came of it.

The scheduler writes a `Plan`, the runtime carries it out and answers with a `StepOutput`.
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
    """One group of layers that keep the same kind of state. A model declares a list of these, one line a group.

    `paged` state can be cut at any token: bytes lie as [layers, planes, pages, page_tokens, *shape].
    `state` is atomic, a snapshot at one length: bytes lie as [layers, slots, *shape].
    """

    group: str
    kind: Literal["paged", "state"]
    layers: tuple[int, ...]
    shape: tuple[int, ...]  # per token and plane (paged), or of one layer's whole state (state)
    dtype: str
    planes: int = 2  # keys and values; 1 for a latent
    page_tokens: int = 16  # one number per model
    window: int | None = None  # a token sees itself and the window - 1 tokens before it
    snapshot_tokens: int = 1024  # state: a snapshot is taken at each multiple of this

    @property
    def unit_elements(self) -> int:
        """Elements of one page (paged) or one slot (state), all layers together."""
        per = math.prod(self.shape) * len(self.layers)
        return per * self.planes * self.page_tokens if self.kind == "paged" else per


# ---------------------------------------------------------------------------------------------------------------------
# The plan: all that a rank must know to run one step. The only way the host changes anything on the device.


class PlanRow(msgspec.Struct, gc=False):
    request_id: str
    row: int
    start: int  # upper bound; the true length lives in the device row
    count: int
    num_drafts: int
    wants_sample: bool


@dataclass(slots=True)
class RowInit:
    """A request takes a row: everything the device needs to know of it from now on."""

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
    group: int  # index into the model's cache specs
    row: int
    first: int  # page index within the row's table
    pages: list[int]


class CopyKind(str, Enum):
    DEVICE = "device"  # page to page, slot to slot (copy-on-write, snapshots)
    OUT = "out"  # device to host
    IN = "in"  # host to device
    ZERO = "zero"  # clear a state slot


@dataclass(slots=True)
class Copy:
    kind: CopyKind
    group: int
    source: int
    target: int


@dataclass(slots=True)
class Plan:
    step: int
    rows: list[PlanRow] = field(default_factory=list)
    added: list[RowInit] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    page_writes: list[PageWrite] = field(default_factory=list)  # for state groups `pages` is the one live slot
    copies: list[Copy] = field(default_factory=list)  # before the forward, in order
    snapshots: list[Copy] = field(default_factory=list)  # after the forward
    may_mask: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(r.count for r in self.rows)


# ---------------------------------------------------------------------------------------------------------------------
# What comes back


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probability and rank of one token, and the most likely alternatives at its place, best first."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class StepOutput:
    """Per plan row, in plan order; `tokens[i]` is empty where the row did not sample."""

    step: int
    tokens: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # plan index -> one per token
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # plan index -> one per prompt token
    drafts: dict[int, list[int]] = field(default_factory=dict)
    pooled: dict[int, list[float]] = field(default_factory=dict)  # plan index -> the pooled hidden states of its prompt
    bad_rows: list[int] = field(default_factory=list)  # plan indices whose logits were not finite
