"""A progress bar on stderr while a benchmark runs, on a terminal only.

It is redrawn at most twice a second; between redraws a call of `Advance` costs one comparison.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]  # takes the amount done so far
SECONDS_BETWEEN = 0.5


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Advance]:
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True)
    task = bar.add_task(what, total=total)
    drawn_at = 0.0

    def advance(done: int) -> None:
        nonlocal drawn_at
        now = time.monotonic()
        if now - drawn_at >= SECONDS_BETWEEN:
            drawn_at = now
            bar.update(task, completed=done, refresh=True)

    with bar:
        yield advance
