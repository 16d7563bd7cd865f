"""How fetching shows itself: a bar on a terminal, one plain line elsewhere, nothing when asked to be quiet.

`fetch`, `hub` and `builtin` report through the `Progress` protocol; whoever resolves a model picks the implementation.
Everything goes to stderr, so stdout stays clean for answers.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol


class Progress(Protocol):
    def start(self, what: str, total: int, done: int = 0) -> None:
        """A transfer of `total` bytes begins, `done` of them already there."""

    def update(self, done: int) -> None: ...

    def finish(self) -> None:
        """The transfer ended, well or not. Safe to call when none is running."""

    def note(self, line: str) -> None:
        """One line for the person waiting."""


class QuietProgress:
    def start(self, what: str, total: int, done: int = 0) -> None: ...

    def update(self, done: int) -> None: ...

    def finish(self) -> None: ...

    def note(self, line: str) -> None: ...


class LineProgress:
    """For logs and pipes: one line when a transfer begins."""

    def start(self, what: str, total: int, done: int = 0) -> None:
        self.note(f"{what} ({format_bytes(total)}" + (f", {format_bytes(done)} already here)" if done else ")"))

    def update(self, done: int) -> None: ...

    def finish(self) -> None: ...

    def note(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class BarProgress:
    """For a terminal. Rich is imported when the first transfer begins, so a warm start never pays for it."""

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


def default_progress() -> Progress:
    return BarProgress() if sys.stderr is not None and sys.stderr.isatty() else LineProgress()


def format_bytes(count: int) -> str:
    """Decimal units, as disks and hubs count: 98.4 MB."""
    size = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 999.5 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
