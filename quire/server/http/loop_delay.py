"""Measures the delay of the HTTP process's event loop, which is the time that any stream waits there.

`run` starts a `LoopDelay` beside the server and `Metrics` counts its observations. A timer fires every `INTERVAL`; its
lateness is the delay by the clock. That includes other work of the machine, so each delay is counted a second time,
limited to this process's processor time since the last tick: only that part can be the server's own work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

INTERVAL = 0.02  # seconds
MAX_MISSED = 500  # most ticks that one delay is counted for

Observe = Callable[[float, float], None]  # the delay by the clock, and the processor time within it


class LoopDelay:
    """A timer on one event loop. `observe` is called for each tick and for each tick that a delay skipped, so that a
    freeze of five seconds counts as much as five quiet seconds."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        observe: Observe,
        clock: Callable[[], float] = time.monotonic,
        processor_clock: Callable[[], float] = time.process_time,
    ):
        self._loop, self._observe = loop, observe
        self._clock, self._processor_clock = clock, processor_clock
        self._timer: asyncio.TimerHandle | None = None
        self._due = self._used = 0.0

    def start(self) -> None:
        self._used = self._processor_clock()
        self._schedule()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self) -> None:
        self._due = self._clock() + INTERVAL
        self._timer = self._loop.call_later(INTERVAL, self._tick)

    def _tick(self) -> None:
        used = self._processor_clock()
        delay, computed = max(0.0, self._clock() - self._due), used - self._used
        self._used = used
        for missed in range(min(MAX_MISSED, int(delay / INTERVAL)) + 1):
            waited = delay - missed * INTERVAL
            self._observe(waited, min(waited, computed))
        self._schedule()
