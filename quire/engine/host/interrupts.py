"""Defers Ctrl-C during a turn of the engine, for a program that runs the loop in its main thread.

Python raises KeyboardInterrupt between any two bytecodes of the main thread, also in the middle of a commit. `LLM`
defers the signal for the length of a turn and delivers it between turns, where every request and page is accounted for.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

MAX_HELD = 2  # the third SIGINT is delivered at once, so that a turn that hangs can be left


class HeldInterrupts:
    """A context in which SIGINT is deferred. No effect in other threads or without a Python handler of SIGINT."""

    def __init__(self) -> None:
        self._previous: Callable[[int, FrameType | None], Any] | None = None
        self._num_held = 0

    def __enter__(self) -> HeldInterrupts:
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):
                self._previous = previous
                signal.signal(signal.SIGINT, self._hold)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self.release()

    def release(self) -> None:
        """Deliver a deferred signal to the previous handler, which usually raises KeyboardInterrupt."""
        if self._num_held and self._previous is not None:
            self._num_held = 0
            self._previous(signal.SIGINT, None)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._num_held += 1
        if self._num_held > MAX_HELD:
            self._num_held = 0
            assert self._previous is not None
            self._previous(number, frame)
