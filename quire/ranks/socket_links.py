"""Links between an engine and ranks that are processes of the same machine: frames over a pair of connected sockets.

The sockets have no address that another process could connect to. A frame is preceded by its length.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable

from quire.engine.host.frames import MAX_FRAME
from quire.engine.host.step_messages import MARK
from quire.engine.workers import DeviceLost
from quire.ranks.messages import RankFailed, decode_from_rank
from quire.types import QuireError

LENGTH = struct.Struct("<I")
LOOK_SECONDS = 0.25  # interval at which the ranks are checked while a step runs


class FrameSocket:
    """Whole frames over a connected socket."""

    def __init__(self, raw: socket.socket):
        self._raw = raw

    def write(self, frame: bytes) -> None:
        self._raw.sendall(LENGTH.pack(len(frame)) + frame)

    def read(self, deadline: float | None = None) -> bytes | None:
        """Returns the next frame; None: the other end has closed. Raises TimeoutError past the deadline."""
        head = self._exactly(LENGTH.size, deadline)
        if head is None:
            return None
        (length,) = LENGTH.unpack(head)
        if length > MAX_FRAME:
            raise QuireError("bad_message", f"A frame of {length} bytes came, more than the limit of {MAX_FRAME}.")
        return self._exactly(length, deadline)

    def wait(self, seconds: float) -> bool:
        """Returns whether there is something to read, or the other end has closed, within this time."""
        return bool(select.select([self._raw], [], [], seconds)[0])

    def interrupts(self) -> bool:
        """Returns whether the next thing to read is no step: the other end has closed, or has rebuilt the group."""
        if not self.wait(0):
            return False
        try:
            seen = self._raw.recv(LENGTH.size + len(MARK), socket.MSG_PEEK)
        except OSError:
            return True
        return not seen or (len(seen) > LENGTH.size and not MARK.startswith(seen[LENGTH.size :]))

    def close(self) -> None:
        self._raw.close()

    def _exactly(self, count: int, deadline: float | None) -> bytes | None:
        parts, left = [], count
        while left:
            if deadline is None:
                self._raw.settimeout(None)
            else:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise TimeoutError
                self._raw.settimeout(remaining)
            try:
                part = self._raw.recv(left)
            except ConnectionResetError:
                part = b""
            if not part:
                return None
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


class SocketRankConnection:
    """The engine's end. Implements `RankConnection`."""

    def __init__(
        self,
        rank: int,
        frames: FrameSocket,
        seconds: float,
        describe: Callable[[int], str],
        look: Callable[[], None] = lambda: None,
    ):
        """`describe`: says where a rank is, for the error when it does not answer. `look`: called now and then while an
        answer is awaited; raises `DeviceLost` if a rank of the group has ended or is frozen."""
        self._look = look
        self.rank = rank
        self._frames = frames
        self._seconds = seconds
        self._describe = describe

    def write(self, frame: bytes) -> None:
        try:
            self._frames.write(frame)
        except OSError:
            raise DeviceLost(f"Rank {self.rank} has ended {self._describe(self.rank)}") from None

    def read(self) -> bytes:
        deadline = time.monotonic() + self._seconds
        while not self._frames.wait(LOOK_SECONDS):
            self._look()
            if time.monotonic() > deadline:
                what = f"Rank {self.rank} did not answer within {self._seconds:g} s {self._describe(self.rank)}"
                raise DeviceLost(what)
        try:
            frame = self._frames.read(deadline + LOOK_SECONDS)
        except TimeoutError:
            raise DeviceLost(f"Rank {self.rank} stopped inside a message {self._describe(self.rank)}") from None
        if frame is None:
            self._look()
            raise DeviceLost(f"Rank {self.rank} has ended {self._describe(self.rank)}")
        if not frame.startswith(MARK):  # no output of a step
            failed = decode_from_rank(frame)
            raise DeviceLost(f"Rank {self.rank} failed: {failed.what if isinstance(failed, RankFailed) else failed}")
        return frame

    def close(self) -> None:
        self._frames.close()
