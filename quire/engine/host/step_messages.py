"""A step's messages as bytes: plan and grammar masks on their way to a group of workers, outputs on their way back.

`Workers` in the engine's own process take the objects and never come here. Workers elsewhere get these frames in the
order of the steps, and nothing else: a plan is all that they need to know.
"""

from __future__ import annotations

import sys
from array import array
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from quire.engine.host.frames import FrameReader, FrameWriter, decode_payload, encode_payload
from quire.types import Plan, StepOutput, TokenArray, pack_tokens
from quire.types.bounds import MAX_TOKENS, MAX_VALUES, Count, StepNumber
from quire.types.plans import TOKEN_BYTES

MARK = b"Qs"
Mask = Annotated[bytes, Meta(max_length=MAX_VALUES * 8)]  # one bit per token id


class StepMasks(msgspec.Struct, tag="masks", array_like=True, gc=False):
    """The masks of a step, once they are filled: plan index -> one bit per token id, set where the token may follow."""

    step: StepNumber
    masks: Annotated[dict[Count, Mask], Meta(max_length=MAX_VALUES)]


def _encode_other(value: Any) -> Any:
    if isinstance(value, array):
        return _little_endian(value).tobytes()
    raise NotImplementedError(f"{type(value).__name__} can't travel")


def _decode_other(kind: type, value: Any) -> Any:
    assert kind is array, f"{kind} can't travel"
    if not isinstance(value, bytes) or len(value) % TOKEN_BYTES or len(value) > MAX_TOKENS * TOKEN_BYTES:
        raise ValueError(f"tokens are at most {MAX_TOKENS} whole 32-bit numbers")
    tokens = pack_tokens(())
    tokens.frombytes(value)
    return _little_endian(tokens)


def _little_endian(tokens: TokenArray) -> TokenArray:
    """Return the tokens with their bytes in the order of the wire, or from it."""
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens


encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_of_engine: msgspec.msgpack.Decoder[Plan | StepMasks] = msgspec.msgpack.Decoder(
    Plan | StepMasks, dec_hook=_decode_other
)
_of_workers: msgspec.msgpack.Decoder[StepOutput] = msgspec.msgpack.Decoder(StepOutput)

M = TypeVar("M")


class StepWriter:
    """Writes the messages of one direction, each as one frame."""

    def __init__(self) -> None:
        self._frames = FrameWriter(MARK)

    def write(self, message: Plan | StepMasks | StepOutput) -> bytes:
        return self._frames.frame(encode_payload(encoder, message))


class StepReader(Generic[M]):
    """Reads the messages of one direction. Any frame but the next one, whole and unchanged, is an error."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]):
        self._decoder = decoder
        self._frames = FrameReader(MARK)

    def read(self, frame: bytes) -> M:
        return decode_payload(self._decoder, self._frames.read(frame))


def workers_reader() -> StepReader[Plan | StepMasks]:
    """Return a reader of what the engine sends to workers."""
    return StepReader(_of_engine)


def engine_reader() -> StepReader[StepOutput]:
    """Return a reader of what workers send to the engine."""
    return StepReader(_of_workers)
