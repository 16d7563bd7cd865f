"""Requests and deltas. Front ends make requests, the scheduler runs them, and deltas return their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import msgspec

from quire.types.bounds import Count, ErrorText, RequestId, TokenIds, Vector
from quire.types.errors import QuireError
from quire.types.params import GrammarSpec, SamplingParams
from quire.types.plans import TokenLogprobs


class FinishReason(str, Enum):
    """Why a request ended."""

    STOP = "stop"  # an end-of-sequence id, a stop id or a stop string
    LENGTH = "length"  # max_tokens or the model's context
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class Status(str, Enum):
    """Where a request is in the scheduler."""

    WAITING = "waiting"  # queued; holds no row and no units
    HELD = "held"  # waits for another request that computes the same prefix
    LOADING = "loading"  # waits for cached blocks that come from a store; holds no row
    RUNNING = "running"  # holds a row and a lease
    DRAINING = "draining"  # preempted; its steps in flight must commit first
    SWAPPED = "swapped"  # swapped out to host memory
    ENDED = "ended"


class GrammarState(Protocol):
    """A compiled grammar and the position of one request in it."""

    error: QuireError | None  # the reason why the grammar allows no further token

    def mask(self, tokens: Sequence[int], start: int = 0) -> bytes:
        """Return one bit per token id, set where the token may follow `tokens[start:]`."""
        ...


class CacheLease(Protocol):
    """What one request holds in the cache; only the cache changes it."""

    units: list[list[int]]  # units on the device, per group
    host: list[list[int]]  # units on the host, per group, while the request is swapped out

    @property
    def is_empty(self) -> bool:
        """True if the lease holds no unit on the device."""
        ...

    def pack(self, tokens: list[int]) -> Sequence[int]:
        """Return the tokens as a packed array, which the lease keeps and the caller must copy."""
        ...


@dataclass(slots=True, eq=False)
class Request:
    """One sequence: its tokens, its parameters and its progress. `computed` <= `planned` <= `expected_len`."""

    id: str
    tokens: list[int]  # the prompt, then the sampled tokens that have committed
    prompt_len: int
    params: SamplingParams
    max_len: int  # maximum length of `tokens`
    stop_ids: frozenset[int] = frozenset()  # end-of-sequence ids and stop ids
    seed: int = 0
    sample_index: int = 0  # index of this sample among n
    priority: int = 0  # smaller runs first
    arrival: float = 0.0
    deadline: float | None = None  # on the engine's clock
    salt: bytes = b""  # prefixes are shared only between requests with one salt
    adapter: str | None = None  # the digest of its weights: prefixes are shared only between requests with one adapter
    grammar: GrammarSpec | GrammarState | None = None  # a spec until it is compiled, before the request is queued
    resumed: bool = False  # continues after a restart of the engine, so admission does not refuse it
    suspect: bool = False  # was in the step that killed an engine, so it runs alone until it is past that step
    # -- written by the scheduler
    planned: int = 0  # tokens that are computed or that some planned step computes
    computed: int = 0  # tokens whose state is in the cache
    pending: int = 0  # upper bound of the sampled tokens in flight, which exist on the device only
    inflight: int = 0  # number of steps in flight with this request
    num_drafts: int = 0  # drafts in the step in flight; such a request is in one step only
    num_proposals: int = 0  # drafts that the device proposes after the step in flight
    # Tokens after `planned` that a step has computed before: rejected drafts took a recurrent state back behind them.
    num_replayed: int = 0
    status: Status = Status.WAITING
    row: int = -1
    lease: CacheLease | None = None  # from the moment the request is queued
    cached_len: int = 0  # prefix cache hit at the first admission
    first_token_at: float = 0.0
    admitted_at: float = 0.0
    preemptions: int = 0
    num_drafted: int = 0  # drafts that were verified, in all steps
    num_accepted: int = 0  # drafts that were accepted, in all steps
    prompt_scored: int = 0  # prompt tokens whose logprobs were sent, since a preempted request computes them again

    @property
    def expected_len(self) -> int:
        """Number of tokens once every step in flight has committed."""
        return len(self.tokens) + self.pending

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) - self.prompt_len


@dataclass(slots=True)
class Usage:
    """Token counts of an ended request."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    accepted_prediction_tokens: int = 0  # drafts that became output
    rejected_prediction_tokens: int = 0  # drafts that were verified in vain


@dataclass(slots=True)
class Timing:
    """Seconds since arrival: until the first admission, until the first token, and in total."""

    queue: float = 0.0
    first_token: float = 0.0
    total: float = 0.0


class Delta(msgspec.Struct, array_like=True, gc=False):
    """What one step adds to one request for its client: new token ids and, once, the reason for its end.

    A delta crosses the wire between the processes as it is; decoding checks the bounds of its fields.
    """

    request_id: RequestId
    token_ids: TokenIds = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: Vector | None = None  # once, when the prompt of a request with `pooling` is computed
    finish_reason: FinishReason | None = None
    error: ErrorText | None = None
    error_code: ErrorText | None = None
    usage: Usage | None = None  # with the finish reason
    timing: Timing | None = None
    accepted: Count = 0  # drafts of this step that became output
    rejected: Count = 0  # drafts of this step that did not
