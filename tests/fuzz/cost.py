"""What a request costs the process that serves it: the longest turn of its event loop, and the memory it made resident.

`Meter` measures both around one request. Time is processor time of the loop's thread within one callback: what every
other stream would have waited, whatever else the machine was doing.
"""

from __future__ import annotations

import asyncio
import time
from asyncio import events
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Cost:
    longest_turn: float = 0.0  # seconds of processor time
    resident: int = 0  # bytes beyond what was resident before, at the worst moment


class Meter:
    """Use it with asyncio's own loop: callbacks of others can't be watched."""

    async def measure(self, work: Callable[[], Awaitable[Any]]) -> tuple[Any, Cost]:
        cost, original = Cost(), events.Handle._run
        await asyncio.sleep(0)

        def timed(handle: events.Handle) -> None:
            began = time.thread_time()
            try:
                original(handle)
            finally:
                if getattr(handle._callback, "__name__", "") != "answer":  # the stub in the engine's place
                    cost.longest_turn = max(cost.longest_turn, time.thread_time() - began)

        before = _reset_peak()
        events.Handle._run = timed  # type: ignore[method-assign]
        try:
            result = await asyncio.create_task(_run(work))
        finally:
            events.Handle._run = original  # type: ignore[method-assign]
        cost.resident = max(0, _status("VmHWM") - before)
        return result, cost


async def _run(work: Callable[[], Awaitable[Any]]) -> Any:
    return await work()


def _reset_peak() -> int:
    """Make the peak of resident memory what is resident now, and return it."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name + ":"))
