"""The wire format between the HTTP process and the engine process: typed, bounded and versioned messages.

Each message is msgpack in a frame of its own (`frames`). Both sides check the frames and the length of every list, so
that a wrong peer is a clear error, a lost, repeated or damaged frame is noticed, and no message makes the other side
allocate without bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.engine.host.frames import decode_payload, encode_payload
from quire.engine.limits import KEPT_STEPS, NUM_SIZES, SpeculationStats, StepShape
from quire.types import Delta, GrammarSpec, QuireError, Request, SamplingParams
from quire.types.bounds import MAX_ERROR, MAX_VALUES, RequestId, TokenIds
from quire.types.control import ControlCommand, ControlReply
from quire.types.sessions import SessionCommand, SessionReply

MARK = b"Qr"
MAX_BATCH = MAX_VALUES
MAX_TEXT = MAX_ERROR
MAX_SAMPLES = 4096

Text = Annotated[str, Meta(max_length=MAX_TEXT)]


# ---------------------------------------------------------------------------------------------------------------------
# To the engine


class Start(msgspec.Struct, tag="start", array_like=True, frozen=True):
    """The first message: every setting that differs from its default. Secrets are passed here, not in arguments."""

    settings: dict[str, Any]
    engine_number: int = 1  # number of engines that this server has started, this one included


class Submit(msgspec.Struct, tag="submit", array_like=True, frozen=True):
    """The samples of one prompt, which is sent once.

    Times are on the machine's monotonic clock, which all processes share. A resumed request includes the tokens that it
    has sampled already.
    """

    ids: Annotated[list[RequestId], Meta(min_length=1, max_length=MAX_SAMPLES)]
    tokens: TokenIds
    params: SamplingParams
    max_len: int
    stop_ids: Annotated[list[int], Meta(max_length=MAX_BATCH)]
    seed: int
    first_index: int
    priority: int
    arrival: float
    deadline: float | None
    salt: Annotated[bytes, Meta(max_length=256)]
    adapter: Annotated[str, Meta(max_length=4096)] | None
    grammar: GrammarSpec | None
    num_sampled: int = 0  # number of sampled tokens at the end of `tokens`
    prompt_scored: int = 0  # number of prompt logprobs that were delivered
    resumed: bool = False  # an earlier engine admitted it, so it is not refused
    suspect: bool = False  # it was in a step that killed an engine


class CancelMany(msgspec.Struct, tag="cancel", array_like=True, frozen=True):
    """A request to cancel several requests."""

    ids: Annotated[list[RequestId], Meta(max_length=MAX_BATCH)]


class StopEngine(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    pass


class IntegrityCheck(msgspec.Struct, tag="check", array_like=True, frozen=True):
    """A request to check that every page, row and lease is accounted for, answered by an `IntegrityReport`."""

    number: int


ToEngine = Start | Submit | CancelMany | StopEngine | IntegrityCheck | SessionCommand | ControlCommand

# ---------------------------------------------------------------------------------------------------------------------
# From the engine


class EngineReady(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The engine is ready; includes what the HTTP process needs to validate requests and describe the model."""

    vocab_size: int
    max_len: int
    eos_ids: list[int]
    defaults: dict[str, Any]
    model: str
    dtype: str
    memory: dict[str, Any]
    limits: dict[str, Any]
    lower: dict[str, Any] = {}  # settings of an engine that needs less memory; empty if there are none


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The engine failed to start, or broke. Carries the error for users."""

    code: Text
    what: Text
    hint: Text = ""
    param: Text | None = None

    def error(self) -> QuireError:
        return QuireError(self.code, self.what, self.hint, self.param)


class Deltas(msgspec.Struct, tag="deltas", array_like=True, frozen=True):
    """The deltas of one or more steps."""

    deltas: Annotated[list[Delta], Meta(max_length=MAX_BATCH)]


class GroupUsage(msgspec.Struct, array_like=True, frozen=True):
    """How many cache units of one group are in use."""

    name: str
    num_units: int
    num_available: int  # free, or evictable from the prefix tree
    num_cached: int = 0  # available units that the prefix tree holds


class TierUsage(msgspec.Struct, array_like=True, frozen=True):
    """What one tier of the cache holds, and its counters since the start."""

    name: str
    num_blocks: int = 0
    num_bytes: int = 0
    hits: int = 0  # blocks loaded
    stores: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    drops: int = 0  # stores without room or with a full queue
    evictions: int = 0
    failures: int = 0
    corrupt: int = 0
    queued: int = 0  # transfers under way


class Beat(msgspec.Struct, tag="beat", array_like=True, frozen=True):
    """The loop's counters, sent regularly between steps. Beats stop when a step hangs."""

    steps: int = 0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    preemptions: int = 0
    ended: int = 0
    running: int = 0
    waiting: int = 0
    held: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    evicted_units: int = 0
    busy_seconds: float = 0.0  # time in turns of the loop since the start
    groups: list[GroupUsage] = []
    rows: int = 0
    prompt_rows: int = 0
    prompt_tokens: int = 0
    recent: Annotated[list[StepShape], Meta(max_length=KEPT_STEPS)] = []  # the last steps, oldest first
    batch_sizes: Annotated[list[int], Meta(max_length=NUM_SIZES)] = []  # steps by rows: up to 1, 2, 4, 8, ...
    suspects: int = 0  # groups of requests that run alone after a failed step
    state: str = "idle"
    transitions: dict[str, int] = {}
    at: float = 0.0  # time of sending on the machine's monotonic clock, since a busy reader receives several at once
    speculation: SpeculationStats | None = None  # None without it
    tiers: Annotated[list[TierUsage], Meta(max_length=16)] = []  # below the device; empty without a host cache
    is_paused: bool = False  # no step is planned: the model sleeps, or its weights are replaced
    loading: int = 0  # requests that wait for blocks of a store
    loaded_tokens: int = 0  # hit tokens that came from a tier below the device
    refused_loads: int = 0  # loads that computing was expected to beat
    # Share of the time with steps in flight in which each pipeline stage waited; empty without stages.
    stage_idle: Annotated[list[float], Meta(max_length=64)] = []


class Fault(msgspec.Struct, tag="fault", array_like=True, frozen=True):
    """A fault that the engine has handled, reported to operators."""

    kind: Text
    what: Text
    ids: Annotated[list[RequestId], Meta(max_length=MAX_BATCH)] = []


class IntegrityReport(msgspec.Struct, tag="checked", array_like=True, frozen=True):
    """The result of an `IntegrityCheck` with the same number; `problem` is None if all is accounted for."""

    number: int
    problem: Text | None
    num_requests: int
    num_leaked: int  # units that neither a request nor the prefix tree holds


FromEngine = EngineReady | Failed | Deltas | Beat | Fault | IntegrityReport | SessionReply | ControlReply

# ---------------------------------------------------------------------------------------------------------------------
# Bytes

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    return encode_payload(_encoder, message)


def decode_to_engine(payload: bytes) -> ToEngine:
    return decode_payload(_to_engine, payload)


def decode_from_engine(payload: bytes) -> FromEngine:
    return decode_payload(_from_engine, payload)


# ---------------------------------------------------------------------------------------------------------------------
# Conversion between the shared types and messages


def submit_message(requests: Sequence[Request]) -> Submit:
    """Return the message for requests that differ in id and sample index only."""
    first = requests[0]
    grammar = first.grammar
    assert grammar is None or isinstance(grammar, GrammarSpec), "a grammar crosses the wire before it is compiled"
    return Submit(
        ids=[request.id for request in requests],
        tokens=first.tokens,
        params=first.params,
        max_len=first.max_len,
        stop_ids=sorted(first.stop_ids),
        seed=first.seed,
        first_index=first.sample_index,
        priority=first.priority,
        arrival=first.arrival,
        deadline=first.deadline,
        salt=first.salt,
        adapter=first.adapter,
        grammar=grammar,
        num_sampled=first.num_sampled,
        prompt_scored=first.prompt_scored,
        resumed=first.resumed,
        suspect=first.suspect,
    )


def submitted_requests(message: Submit) -> list[Request]:
    return [
        Request(
            id=name,
            tokens=list(message.tokens),
            prompt_len=max(0, len(message.tokens) - message.num_sampled),
            params=message.params.of_sample(message.first_index + place),
            max_len=message.max_len,
            stop_ids=frozenset(message.stop_ids),
            seed=message.seed,
            sample_index=message.first_index + place,
            priority=message.priority,
            arrival=message.arrival,
            deadline=message.deadline,
            salt=message.salt,
            adapter=message.adapter,
            grammar=message.grammar,
            prompt_scored=message.prompt_scored,
            resumed=message.resumed,
            suspect=message.suspect,
        )
        for place, name in enumerate(message.ids)
    ]


def deltas_message(deltas: list[Delta]) -> Deltas:
    """At most `MAX_BATCH` deltas; error texts are cut to the length that the other process accepts."""
    for delta in deltas:
        if delta.error is not None and len(delta.error) > MAX_TEXT:
            delta.error = delta.error[:MAX_TEXT]
    return Deltas(deltas)
