"""Links between an engine and ranks that are threads of its process. For tests and benchmarks."""

from __future__ import annotations

import queue

from quire.engine.workers import DeviceLost


class ThreadLink:
    """Both ends of one rank's link."""

    def __init__(self, rank: int, seconds: float = 60.0):
        self._rank = rank
        self._seconds = seconds
        self._plans: queue.Queue[bytes | None] = queue.Queue()
        self._outputs: queue.Queue[bytes | None] = queue.Queue()
        self.engine = _EngineEnd(self)
        self.rank = _RankEnd(self)

    def send_plan(self, frame: bytes | None) -> None:
        self._plans.put(frame)

    def next_plan(self) -> bytes | None:
        return self._plans.get()

    def send_output(self, frame: bytes | None) -> None:
        self._outputs.put(frame)

    def next_output(self) -> bytes:
        try:
            frame = self._outputs.get(timeout=self._seconds)
        except queue.Empty:
            raise DeviceLost(f"Rank {self._rank} did not answer within {self._seconds:g} s") from None
        if frame is None:
            raise DeviceLost(f"Rank {self._rank} has ended")
        return frame


class _EngineEnd:
    """Implements `RankConnection`."""

    def __init__(self, link: ThreadLink):
        self._link = link

    def write(self, frame: bytes) -> None:
        self._link.send_plan(frame)

    def read(self) -> bytes:
        return self._link.next_output()

    def close(self) -> None:
        self._link.send_plan(None)


class _RankEnd:
    """Implements `RankLink`."""

    def __init__(self, link: ThreadLink):
        self._link = link

    def read(self) -> bytes | None:
        return self._link.next_plan()

    def write(self, frame: bytes) -> None:
        self._link.send_output(frame)

    def end(self) -> None:
        """Tells the engine that this rank has ended."""
        self._link.send_output(None)
