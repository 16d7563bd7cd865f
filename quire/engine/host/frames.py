"""Frames: one message each between two processes, numbered and checksummed.

A frame is a mark, the version, a running number, a checksum and a payload. `wire` (HTTP process and engine process) and
`step_messages` (engine and workers) put msgpack messages into frames, each with a mark of its own. Both ends check all
of it, so that a lost, repeated, damaged or foreign frame is a clear error and no message is taken twice.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, TypeVar

import msgspec

from quire.types import QuireError

VERSION = 3
MAX_FRAME = 256 << 20
MAX_NUMBER = 1 << 32
_HEAD = struct.Struct("<2sBII")  # mark, version, number, checksum of the rest

M = TypeVar("M")


def encode_payload(encoder: msgspec.msgpack.Encoder, message: Any) -> bytes:
    """Return a message's bytes, at most as many as fit into a frame."""
    try:
        payload = encoder.encode(message)
    except UnicodeEncodeError:  # in a stop string or a pattern, since the prompt is token ids here
        raise QuireError("invalid_text", "A text contains half a surrogate pair.", "Send valid Unicode.") from None
    if len(payload) > MAX_FRAME - _HEAD.size:
        what = f"A message of {len(payload)} bytes exceeds the limit of {MAX_FRAME} bytes."
        raise QuireError("message_too_large", what, "Send fewer tokens, or request fewer logprobs.")
    return payload


def decode_payload(decoder: msgspec.msgpack.Decoder[M], payload: bytes) -> M:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, QuireError, RecursionError, ValueError, OverflowError) as error:
        raise QuireError("bad_message", f"A message between the processes is malformed: {error}.") from None


class FrameWriter:
    """Writes the frames of one direction, with running numbers."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._number = 0

    def frame(self, payload: bytes) -> bytes:
        self._number = (self._number + 1) % MAX_NUMBER
        checksum = zlib.crc32(payload, self._number)
        return _HEAD.pack(self._mark, VERSION, self._number, checksum) + payload


class FrameReader:
    """Reads the frames of one direction, in order and each once."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._last = 0

    def read(self, frame: bytes) -> bytes:
        """Return the message in a frame. Raises if the frame is foreign, damaged, repeated or not the next one, or if
        the other process has another version; the reader then still expects the same frame."""
        if len(frame) < _HEAD.size or frame[:2] != self._mark or len(frame) > MAX_FRAME:
            what = f"{len(frame)} bytes arrived that are no message between these processes."
            raise QuireError("frames_foreign", what)
        _, version, number, checksum = _HEAD.unpack_from(frame)
        if version != VERSION:
            what = f"The other process uses version {version} of the wire format, this one version {VERSION}."
            raise QuireError("version_mismatch", what, "Run both from the same installation of Quire.")
        payload = frame[_HEAD.size :]
        if zlib.crc32(payload, number) != checksum:
            raise QuireError("frames_damaged", "A message between the processes arrived damaged.")
        expected = (self._last + 1) % MAX_NUMBER
        if number != expected:
            if (expected - number) % MAX_NUMBER < MAX_NUMBER // 2:
                raise QuireError("frames_repeated", f"Message {number} between the processes arrived again.")
            what = f"Message {expected} between the processes is missing; message {number} arrived instead."
            raise QuireError("frames_lost", what)
        self._last = number
        return payload

    def open(self, frame: bytes) -> bytes | None:
        """Like `read` on a socket that others may write to: None for a foreign or repeated frame, which is dropped."""
        try:
            return self.read(frame)
        except QuireError as error:
            if error.code in ("frames_foreign", "frames_repeated"):
                return None
            raise
