"""Encodes JSON and server-sent events for all replies. Encoding never fails on invalid Unicode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_encoder = msgspec.json.Encoder()


def to_json(value: Any) -> bytes:
    try:
        return _encoder.encode(value)
    except (UnicodeEncodeError, msgspec.MsgspecError):  # half a surrogate pair from a client: write an escape
        return json.dumps(value, allow_nan=False).encode("ascii")


async def list_json(items: Sequence[T], shown: Callable[[Sequence[T]], list[Any]], at_a_time: int) -> msgspec.Raw:
    """A long list as JSON, encoded in slices between which the event loop runs. `shown` maps items to JSON values."""
    parts = []
    for begin in range(0, len(items), at_a_time):
        parts.append(to_json(shown(items[begin : begin + at_a_time]))[1:-1])
        await asyncio.sleep(0)
    return msgspec.Raw(b"[" + b",".join(part for part in parts if part) + b"]")


def data_event(value: Any) -> bytes:
    """An event without a name, the form of OpenAI's chat and completion streams."""
    return b"data: " + to_json(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + to_json(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
