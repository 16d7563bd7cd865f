"""Data exchanged between scheduler and runtime: cache specs, the plan of a step, and its output.

The scheduler writes a `Plan`; the runtime executes it and returns a `StepOutput`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from quire.types.bounds import (
    MAX_DRAFTS,
    MAX_UNITS,
    MAX_VALUES,
    AdapterDigest,
    Count,
    RequestId,
    StepNumber,
    TokenIds,
    Vector,
)
from quire.types.params import SamplingParams

TOKEN_CODE = "I"  # array type code: ids are never negative, and "I" packs them in a third of the time of "i"
TOKEN_BYTES = 4
if TYPE_CHECKING:
    TokenArray = array[int]
else:
    TokenArray = array  # not subscriptable at run time before Python 3.12


def pack_tokens(tokens: Iterable[int]) -> TokenArray:
    """Return token ids as an array of 32-bit integers."""
    return array(TOKEN_CODE, tokens)


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
    packing: str = ""  # paged: a key of `CACHE_FORMS`, how entries of bytes hold keys and values; "": numbers of dtype

    @property
    def unit_elements(self) -> int:
        """Number of elements of one page (paged) or one slot (state) over all layers."""
        per = math.prod(self.shape) * len(self.layers)
        return per * self.planes * self.page_tokens if self.kind == "paged" else per


# ---------------------------------------------------------------------------------------------------------------------
# The plan of a step: all that a rank needs to run it, and the only way the scheduler changes state on the device.


class PlanRow(msgspec.Struct, array_like=True, gc=False):
    """The tokens of one request that a step computes."""

    request_id: RequestId
    row: Count
    start: Count  # upper bound; the device row holds the true length
    count: Count  # with the drafts
    num_drafts: Count  # how many of the last tokens are drafts; each of them and the token before them are sampled
    wants_sample: bool
    num_replayed: Count = 0  # how many of the first tokens are computed again after a rejected draft, see `Request`


class RowInit(msgspec.Struct, array_like=True, gc=False):
    """A request that enters a row, with everything the device needs to run it."""

    request_id: RequestId
    row: Count
    tokens: TokenArray
    prompt_len: Count
    computed: Count
    params: SamplingParams
    stop_ids: tuple[int, ...]
    seed: int
    sample_index: Count
    adapter: int = -1  # the slot of its adapter; -1: the base model


class AdapterLoad(msgspec.Struct, array_like=True, gc=False):
    """An adapter that enters a slot of the device, in place of what the slot holds."""

    slot: Count
    adapter: AdapterDigest


class PageWrite(msgspec.Struct, array_like=True, gc=False):
    """An update of a row's page table."""

    group: Count  # index into the model's cache specs
    row: Count
    first: Count  # index of the first entry written in the row's page table
    pages: Annotated[list[Count], Meta(max_length=MAX_UNITS)]


class CopyKind(str, Enum):
    """The direction of a copy."""

    DEVICE = "device"  # page to page, slot to slot (copy-on-write, snapshots)
    OUT = "out"  # device to host
    IN = "in"  # host to device
    ZERO = "zero"  # clear a state slot


class Copy(msgspec.Struct, array_like=True, gc=False):
    """A copy of one unit within a group."""

    kind: CopyKind
    group: Count
    source: Count
    target: Count


Copies = Annotated[list[Copy], Meta(max_length=MAX_UNITS)]


class Plan(msgspec.Struct, tag="plan", array_like=True, gc=False):
    """One step: the rows to compute, and the changes of rows, page tables and cache units that go with it."""

    step: StepNumber
    rows: Annotated[list[PlanRow], Meta(max_length=MAX_VALUES)] = []
    added: Annotated[list[RowInit], Meta(max_length=MAX_VALUES)] = []
    freed: Annotated[list[Count], Meta(max_length=MAX_VALUES)] = []
    # In state groups a write's `pages` holds the live slot.
    page_writes: Annotated[list[PageWrite], Meta(max_length=MAX_VALUES)] = []
    copies: Copies = []  # executed before the forward pass, in order
    snapshots: Copies = []  # executed after the forward pass
    may_mask: bool = False  # some row may have a grammar, so sampling waits for the masks
    # Plan index -> drafts of a row that come from the host. A row with drafts is in one step in flight only.
    drafts: dict[Count, Annotated[list[Count], Meta(max_length=MAX_DRAFTS)]] = {}
    proposed: list[Count] = []  # plan indices of the rows whose drafts are the first of those that the device proposed
    # Plan index -> how many drafts of the row's next tokens the device's draft network proposes after this step.
    proposals: dict[Count, Annotated[int, Meta(ge=1, le=MAX_DRAFTS)]] = {}
    adapters: Annotated[list[AdapterLoad], Meta(max_length=MAX_VALUES)] = []  # before the rows are set, in order

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


class StepOutput(msgspec.Struct, array_like=True, gc=False):
    """Results per plan row, in plan order; `tokens[i]` is empty if row i did not sample. Keys are plan indices.

    A row with drafts returns the accepted ones and the token sampled after them: `len(tokens[i]) - 1` were accepted.
    """

    step: StepNumber
    tokens: Annotated[list[TokenIds], Meta(max_length=MAX_VALUES)]
    logprobs: dict[int, list[TokenLogprobs]] = {}  # one per token
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # one per prompt token
    drafts: dict[int, list[int]] = {}  # drafts that the device has proposed for the row's next step
    draft_chances: dict[int, Vector] = {}  # plan index -> the draft network's probability of each draft
    draft_seconds: float = 0.0  # time that the device took to propose them
    pooled: dict[int, Vector] = {}  # pooled hidden states of the prompt
    busy: Annotated[
        list[float], Meta(max_length=64)
    ] = []  # seconds that each pipeline stage computed, if there are several
    bad_rows: Annotated[list[Count], Meta(max_length=MAX_VALUES)] = []  # rows for which no token could be sampled
