"""How late a loop is, told by a clock of the test's own: each tick counts, and so does each that was missed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.server.http.loop_delay import INTERVAL, MAX_MISSED, LoopDelay


class FakeLoop:
    """Takes timers and runs them when told; `now` and `used` are the clocks."""

    def __init__(self) -> None:
        self.now = self.used = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay: float, callback: Callable[[], None]) -> Any:
        timer = (self.now + delay, callback)
        self.timers.append(timer)
        timers = self.timers

        class Handle:
            def cancel(self) -> None:
                timers.remove(timer)

        return Handle()

    def fire(self, late: float, used: float) -> None:
        due, callback = self.timers.pop()
        self.now = due + late
        self.used += used
        callback()


def make() -> tuple[FakeLoop, LoopDelay, list[tuple[float, float]]]:
    loop, seen = FakeLoop(), []
    delay = LoopDelay(loop, lambda *pair: seen.append(pair), lambda: loop.now, lambda: loop.used)  # type: ignore[arg-type]
    delay.start()
    return loop, delay, seen


def test_a_punctual_tick_counts_once() -> None:
    loop, _, seen = make()
    loop.fire(late=0.001, used=0.0005)
    assert seen == [(pytest.approx(0.001), pytest.approx(0.0005))] and len(loop.timers) == 1


def test_a_freeze_counts_for_every_tick_it_swallowed() -> None:
    loop, _, seen = make()
    loop.fire(late=10.5 * INTERVAL, used=0.001)
    assert len(seen) == 11 and seen[0][0] == pytest.approx(10.5 * INTERVAL)
    assert seen[-1][0] == pytest.approx(0.5 * INTERVAL)
    assert all(computed <= 0.001 for _, computed in seen), "the machine was busy, the process was not"
    loop.fire(late=1e6, used=1e6)
    assert len(seen) == 11 + MAX_MISSED + 1


def test_a_loop_that_computes_is_told_from_one_that_was_not_run() -> None:
    loop, _, seen = make()
    loop.fire(late=0.01, used=0.5)
    assert seen == [(pytest.approx(0.01), pytest.approx(0.01))], "no more than the delay"


def test_stopping_cancels_the_timer() -> None:
    loop, delay, _ = make()
    delay.stop()
    assert not loop.timers
