"""Log lines on stderr, as text or as JSON. Each line about a request carries the request's id."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, TextIO

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class Log:
    """Writes log lines to a stream, by default to stderr."""

    def __init__(self, level: str = "info", form: str = "text", stream: TextIO | None = None):
        self._least = LEVELS[level]
        self._json = form == "json"
        self._stream = stream

    def write(self, level: str, event: str, **fields: Any) -> None:
        if LEVELS[level] < self._least:
            return
        now = time.time()
        shown = {key: value for key, value in fields.items() if value is not None}
        if self._json:
            line = json.dumps({"time": round(now, 3), "level": level, "event": event, **shown}, default=str)
        else:
            clock = time.strftime("%H:%M:%S", time.localtime(now))
            line = " ".join([clock, level, event, *(f"{key}={_shown(value)}" for key, value in shown.items())])
        stream = self._stream or sys.stderr
        try:
            stream.write(line + "\n")
            stream.flush()
        except (OSError, ValueError):
            pass  # a broken log stream must not stop the server


class LibraryLines(logging.Handler):
    """Forwards log records of libraries, such as uvicorn's about invalid HTTP, to the server's log."""

    def __init__(self, log: Log):
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        level = next((name for name, number in LEVELS.items() if record.levelno <= number), "error")
        self._log.write(level, "library", name=record.name, message=record.getMessage())


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return json.dumps(text) if not text.isprintable() or " " in text or not text else text
