"""Streams that outlive their connection: events are numbered and kept, and a client that lost them reads on.

A request asks for it with the header `X-Quire-Resume`. `stream_reader` then reads its run in a task of its own, and
every connection follows what is kept here. `stream_reply` starts it, `/v1/streams/{stream_id}` resumes it.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.server.http.errors import ApiError, bad_request

MAX_STREAMS = 1024
MAX_BYTES = 64 << 20  # of all kept streams together
EVENT_ID = re.compile(r"(strm_[0-9a-f]{24}):([0-9]{1,9})")


@dataclass(slots=True)
class KeptStream:
    """One stream's events so far."""

    id: str
    owner: str  # digest of the creator's key; no other key may read it
    seconds: float  # how long it is kept without a reader
    clock: Callable[[], float]
    events: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    is_complete: bool = False
    num_readers: int = 0
    left_at: float = 0.0  # when the last reader left
    cancelled: bool = False
    _waiting: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def was_left(self) -> bool:
        """Whether it had no client for as long as it is kept."""
        return not self.num_readers and self.clock() - self.left_at > self.seconds

    @property
    def must_end(self) -> bool:
        return self.cancelled or self.was_left

    def add(self, frames: bytes) -> None:
        """Keep the events in some frames, each with its number. Comments are not events."""
        for frame in frames.split(b"\n\n"):
            if frame and not frame.startswith(b":"):
                event = b"id: %s:%d\n%s\n\n" % (self.id.encode(), len(self.events), frame)
                self.events.append(event)
                self.num_bytes += len(event)
        self._wake()

    def complete(self) -> None:
        self.is_complete = True
        self._wake()

    def _wake(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting.clear()

    def join(self) -> None:
        """Count a reader."""
        self.num_readers += 1

    def leave(self) -> None:
        self.num_readers -= 1
        self.left_at = self.clock()

    async def wait(self, place: int, patience: float) -> None:
        """Wait for an event at this place, for the end, or for `patience` seconds."""
        if place < len(self.events) or self.is_complete:
            return
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            await asyncio.wait_for(waiting, patience)
        except TimeoutError:
            self._waiting = [one for one in self._waiting if one is not waiting]


class KeptStreams:
    """All streams that can be resumed, within bounds of their number and bytes."""

    def __init__(self, max_seconds: float, clock: Callable[[], float] = time.monotonic):
        self._max_seconds = max_seconds
        self._clock = clock
        self._streams: dict[str, KeptStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def seconds_of(self, header: str | None) -> float | None:
        """How long a request wants its stream to be kept; None if it does not."""
        if header is None:
            return None
        wanted = self._max_seconds if header == "true" else float(header) if re.fullmatch(r"\d{1,6}", header) else -1.0
        if wanted < 0:
            message = "X-Quire-Resume is true, or the seconds for which the stream is kept."
            raise bad_request("invalid_header", message)
        if not self._max_seconds:
            raise bad_request("unsupported_parameter", "This server keeps no streams; see --resume-seconds.")
        return min(wanted, self._max_seconds)

    def open(self, owner: str, seconds: float) -> KeptStream:
        self.sweep()
        if len(self._streams) >= MAX_STREAMS or sum(one.num_bytes for one in self._streams.values()) > MAX_BYTES:
            message = "The server keeps as many streams as it may. Try again a little later, or without resuming."
            raise ApiError(503, "overloaded", message, headers={"retry-after": "5"})
        stream = KeptStream(f"strm_{secrets.token_hex(12)}", owner, seconds, self._clock, left_at=self._clock())
        self._streams[stream.id] = stream
        return stream

    def find(self, stream_id: str, owner: str) -> KeptStream:
        self.sweep()
        stream = self._streams.get(stream_id)
        if stream is None or stream.owner != owner:
            message = f"There is no stream {stream_id[:100]!r}. It may have been kept for its time and be gone."
            raise ApiError(404, "not_found", message, "stream_id")
        return stream

    def sweep(self) -> None:
        """Forget streams that are complete and were left too long ago."""
        gone = [name for name, one in self._streams.items() if one.is_complete and one.was_left]
        for name in gone:
            del self._streams[name]

    def keep_task(self, task: asyncio.Task[None]) -> None:
        """Hold a task that reads a stream until it ends."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
