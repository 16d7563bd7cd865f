"""The bar of a model that loads: it appears after two seconds, and then shows what was done until then."""

from __future__ import annotations

import sys

import pytest

from quire.files.progress import LateProgress, QuietProgress, loading_progress


class Calls:
    def __init__(self) -> None:
        self.all: list[tuple[str, object]] = []

    def start(self, what: str, total: int, done: int = 0) -> None:
        self.all.append(("start", (what, total, done)))

    def update(self, done: int) -> None:
        self.all.append(("update", done))

    def finish(self) -> None:
        self.all.append(("finish", None))

    def note(self, line: str) -> None:
        self.all.append(("note", line))


def test_a_bar_appears_after_two_seconds() -> None:
    shown, now = Calls(), [10.0]
    progress = LateProgress(shown, 2.0, lambda: now[0])
    progress.start("Loading", 100)
    for now[0], done in ((11.0, 10), (11.9, 20), (12.0, 30), (13.0, 60)):
        progress.update(done)
    progress.finish()
    assert shown.all == [("start", ("Loading", 100, 30)), ("update", 30), ("update", 60), ("finish", None)]
    progress.start("Loading again", 5)
    progress.update(5)
    progress.finish()
    assert len(shown.all) == 4, "a quick one is not shown"


def test_where_no_one_looks_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert isinstance(loading_progress(), QuietProgress)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert isinstance(loading_progress(), LateProgress)
