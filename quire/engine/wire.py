"""What the HTTP process and the engine process say to each other: typed, bounded, versioned messages, never pickle.

A frame is a mark, the version of this file and one msgpack message. `process` and `client` are the only callers. Both
ends check the version of every frame and the length of every list, so a wrong peer is a clear error and no message can
make the other side allocate without bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from quire.engine.limits import KEPT_STEPS, StepShape
from quire.types import (
    Delta,
    FinishReason,
    GrammarSpec,
    QuireError,
    Request,
    SamplingParams,
    Timing,
    TokenLogprobs,
    Usage,
)

VERSION = 1
MARK = b"Qr"
MAX_FRAME = 256 << 20
MAX_TOKENS = 1 << 24
MAX_BATCH = 1 << 16
MAX_TEXT = 1 << 20
MAX_SAMPLES = 4096

Id = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
TokenIds = Annotated[list[int], Meta(max_length=MAX_TOKENS)]


# ---------------------------------------------------------------------------------------------------------------------
# To the engine


class Start(msgspec.Struct, tag="start", array_like=True, frozen=True):
    """The first message: every setting that is not at its default. A secret travels here, never on a command line."""

    settings: dict[str, Any]


class Submit(msgspec.Struct, tag="submit", array_like=True, frozen=True):
    """The samples of one prompt; the prompt is sent once. Times are on the machine's monotonic clock, which all
    processes share."""

    ids: Annotated[list[Id], Meta(min_length=1, max_length=MAX_SAMPLES)]
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


class CancelMany(msgspec.Struct, tag="cancel", array_like=True, frozen=True):
    ids: Annotated[list[Id], Meta(max_length=MAX_BATCH)]


class StopEngine(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    pass


ToEngine = Start | Submit | CancelMany | StopEngine

# ---------------------------------------------------------------------------------------------------------------------
# From the engine


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The engine is up: what the other side must know to validate requests and to describe the model."""

    vocab_size: int
    max_len: int
    eos_ids: list[int]
    defaults: dict[str, Any]
    model: str
    dtype: str
    memory: dict[str, Any]
    limits: dict[str, Any]


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The engine could not start, or broke. The error as a person should read it."""

    code: Text
    what: Text
    hint: Text = ""
    param: Text | None = None

    def error(self) -> QuireError:
        return QuireError(self.code, self.what, self.hint, self.param)


class Ended(msgspec.Struct, array_like=True, frozen=True):
    reason: FinishReason
    error: Text | None
    error_code: Text | None
    usage: Usage | None
    timing: Timing | None


class News(msgspec.Struct, array_like=True, frozen=True):
    """One delta. What most of them lack costs one byte each."""

    id: Id
    token_ids: TokenIds
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    ended: Ended | None = None
    embedding: Annotated[list[float], Meta(max_length=MAX_BATCH)] | None = None


class Deltas(msgspec.Struct, tag="deltas", array_like=True, frozen=True):
    news: Annotated[list[News], Meta(max_length=MAX_BATCH)]


class Group(msgspec.Struct, array_like=True, frozen=True):
    name: str
    num_units: int
    num_available: int  # free, or held by the prefix tree alone
    num_cached: int = 0  # of these, held by the tree


class Beat(msgspec.Struct, tag="beat", array_like=True, frozen=True):
    """A sign of life from the loop itself, with its counters. Sent between steps, so a stuck step shows as silence."""

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
    busy_seconds: float = 0.0  # in turns of the loop since the start
    groups: list[Group] = []
    rows: int = 0
    prompt_rows: int = 0
    prompt_tokens: int = 0
    recent: Annotated[list[StepShape], Meta(max_length=KEPT_STEPS)] = []  # the last steps, oldest first


FromEngine = Ready | Failed | Deltas | Beat

# ---------------------------------------------------------------------------------------------------------------------
# Frames

M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
_PREFIX = MARK + bytes([VERSION])


def encode(message: ToEngine | FromEngine) -> bytes:
    try:
        frame = _PREFIX + _encoder.encode(message)
    except UnicodeEncodeError:  # in a stop string or a pattern; the prompt itself is tokens by now
        raise QuireError("invalid_text", "A text holds half a surrogate pair.", "Send valid Unicode.") from None
    if len(frame) > MAX_FRAME:
        what = f"A message of {len(frame)} bytes is larger than the {MAX_FRAME} the engine takes."
        raise QuireError("message_too_large", what, "Send fewer tokens, or ask for fewer logprobs.")
    return frame


def decode_to_engine(frame: bytes) -> ToEngine:
    return _decode(_to_engine, frame)


def decode_from_engine(frame: bytes) -> FromEngine:
    return _decode(_from_engine, frame)


def _decode(decoder: msgspec.msgpack.Decoder[M], frame: bytes) -> M:
    if len(frame) > MAX_FRAME or frame[:2] != MARK:
        raise QuireError("bad_message", "What came in on the engine's socket is no message of Quire's.")
    if frame[2:3] != _PREFIX[2:]:
        raise QuireError(
            "version_mismatch",
            f"The other process speaks version {frame[2] if len(frame) > 2 else '?'} of the wire format, "
            f"this one version {VERSION}.",
            "Run both from the same installation of Quire.",
        )
    try:
        return decoder.decode(memoryview(frame)[3:])
    except msgspec.MsgspecError as error:
        raise QuireError("bad_message", f"A message between the processes is malformed: {error}.") from None


# ---------------------------------------------------------------------------------------------------------------------
# Between the shared types and messages


def submit_message(requests: Sequence[Request]) -> Submit:
    """Requests that differ in nothing but id and sample index."""
    first = requests[0]
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
        grammar=first.grammar,
    )


def submitted_requests(message: Submit) -> list[Request]:
    return [
        Request(
            id=name,
            tokens=list(message.tokens),
            prompt_len=len(message.tokens),
            params=message.params,
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
        )
        for place, name in enumerate(message.ids)
    ]


def news_of(delta: Delta) -> News:
    ended = None
    if delta.finish_reason is not None:
        what = None if delta.error is None else delta.error[:MAX_TEXT]
        ended = Ended(delta.finish_reason, what, delta.error_code, delta.usage, delta.timing)
    return News(delta.request_id, delta.token_ids, delta.logprobs, delta.prompt_logprobs, ended, delta.embedding)


def delta_of(news: News) -> Delta:
    delta = Delta(news.id, news.token_ids, news.logprobs, news.prompt_logprobs, news.embedding)
    if news.ended is not None:
        end = news.ended
        delta.finish_reason, delta.error, delta.error_code = end.reason, end.error, end.error_code
        delta.usage, delta.timing = end.usage, end.timing
    return delta
