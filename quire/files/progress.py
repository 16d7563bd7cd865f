"""Displays download progress: a bar on a terminal, one line per transfer elsewhere, or nothing.

`fetch`, `hub` and `builtin` report through the `Progress` protocol; the caller of `resolve_model` chooses the
implementation. All output goes to stderr, so that stdout only has the model's text.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol


class Progress(Protocol):
    """Receives the progress of one transfer at a time."""

    def start(self, what: str, total: int, done: int = 0) -> None:
        """Begins a transfer of `total` bytes, of which `done` are present already."""

    def update(self, done: int) -> None: ...

    def finish(self) -> None:
        """Ends the transfer, successful or not. Has no effect without one."""

    def note(self, line: str) -> None:
        """Prints one line for the user."""


class QuietProgress:
    """Shows nothing."""

    def start(self, what: str, total: int, done: int = 0) -> None: ...

    def update(self, done: int) -> None: ...

    def finish(self) -> None: ...

    def note(self, line: str) -> None: ...


class LineProgress:
    """Prints one line per transfer, for logs and pipes."""

    def start(self, what: str, total: int, done: int = 0) -> None:
        self.note(f"{what} ({format_bytes(total)}" + (f", {format_bytes(done)} already here)" if done else ")"))

    def update(self, done: int) -> None: ...

    def finish(self) -> None: ...

    def note(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class BarProgress:
    """Shows a bar on a terminal. Imports rich at the first transfer, so that starts without downloads stay fast."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def start(self, what: str, total: int, done: int = 0) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self.finish()
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        text = TextColumn("{task.description}", markup=False)
        self._bar = Progress(text, *columns, console=Console(stderr=True))
        self._task = self._bar.add_task(what, total=total, completed=done)
        self._bar.start()

    def update(self, done: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def note(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class LateProgress:
    """Shows a transfer in another display once it takes longer than a moment, so that a quick one leaves no trace."""

    def __init__(self, shown: Progress, seconds: float = 2.0, clock: Callable[[], float] = time.monotonic):
        self._shown, self._seconds, self._clock = shown, seconds, clock
        self._what, self._total, self._since, self._is_shown = "", 0, 0.0, False

    def start(self, what: str, total: int, done: int = 0) -> None:
        self.finish()
        self._what, self._total, self._since = what, total, self._clock()

    def update(self, done: int) -> None:
        if not self._is_shown and self._clock() - self._since >= self._seconds:
            self._is_shown = True
            self._shown.start(self._what, self._total, done)
        if self._is_shown:
            self._shown.update(done)

    def finish(self) -> None:
        if self._is_shown:
            self._shown.finish()
        self._is_shown = False

    def note(self, line: str) -> None:
        self._shown.note(line)


def loading_progress() -> Progress:
    """Returns a bar that appears after two seconds on a terminal; nothing elsewhere, where programs read the logs."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    return LateProgress(BarProgress()) if is_terminal else QuietProgress()


def default_progress() -> Progress:
    """Returns a bar on a terminal, lines elsewhere."""
    return BarProgress() if sys.stderr is not None and sys.stderr.isatty() else LineProgress()


def format_bytes(count: int) -> str:
    """Formats bytes in decimal units, as disks and hubs do: 98.4 MB."""
    size = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 999.5 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
