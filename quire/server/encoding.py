"""JSON and server-sent events as bytes, quickly and without ever failing on odd text. All replies go through here."""

from __future__ import annotations

import json
from typing import Any

import msgspec

_encoder = msgspec.json.Encoder()


def to_json(value: Any) -> bytes:
    try:
        return _encoder.encode(value)
    except (UnicodeEncodeError, msgspec.MsgspecError):  # half a surrogate pair that a client sent: written as an escape
        return json.dumps(value, allow_nan=False).encode("ascii")


def data_event(value: Any) -> bytes:
    """An event without a name, as OpenAI's chat and completion streams have them."""
    return b"data: " + to_json(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + to_json(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
