"""The seam between dialects and the sending of replies: how pieces of output become frames of a stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from quire.server.http.errors import ApiError
from quire.server.sample import Piece


class StreamEncoder(Protocol):
    """Encodes pieces as frames in the dialect's order."""

    keep_alive: bytes

    def start(self) -> bytes: ...

    def push(self, pieces: Iterable[Piece]) -> bytes: ...

    async def finish(self) -> bytes: ...

    def fail(self, error: ApiError) -> bytes: ...
