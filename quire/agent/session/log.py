"""One session's file: records are appended with one write each, so a kill loses at most the line being written.

A last line that was cut off is removed when the file is opened again. Another line that can't be read is left out and
reported. A lock keeps two processes from writing to one session.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from pathlib import Path

from quire.agent.session.records import VERSION, Record, SessionState
from quire.types import QuireError

try:
    import fcntl
except ImportError:  # a system without it: sessions are not locked
    fcntl = None  # type: ignore[assignment]

MAX_FILE = 1 << 30
MAX_LINE = 64 << 20


class SessionLog:
    """An open session: its state, and the file that holds every record."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.state = SessionState()
        self.notes: list[str] = []  # what was wrong with the file
        self._descriptor = descriptor

    @classmethod
    def create(cls, folder: Path, *, project: str, model: str, system: str, tools: list[str]) -> SessionLog:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        path = folder / f"{name}.jsonl"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        log = cls(path, descriptor)
        log._lock()
        first = {"type": "session", "version": VERSION, "id": name, "created": time.time(), "folder": project}
        log.add({**first, "model": model, "system": system, "tools": tools})
        return log

    @classmethod
    def resume(cls, path: Path) -> SessionLog:
        """Opens a session to go on with it."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            what = f"The session {path} can't be opened: {error.strerror}."
            raise QuireError("unknown_session", what, "/sessions lists them.") from error
        log = cls(path, descriptor)
        try:
            log._lock()
            log._cut_last_line()
            records, log.notes = read_records(path)
            for record in records:
                log.state.apply(record)
            if not log.state.id:
                what = f"{path} is no session: it does not begin with a session's first line."
                raise QuireError("invalid_session", what, "Start a new one.")
        except BaseException:
            log.close()
            raise
        for record in log.state.closing_records():
            log.add(record)
        return log

    def add(self, record: Record) -> None:
        """Appends a record and applies it."""
        stamped = {**record, "at": round(time.time(), 3)}
        line = json.dumps(stamped, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        try:
            os.write(self._descriptor, line)
        except OSError as error:
            what = f"The session can't be written to {self.path}: {error.strerror}."
            raise QuireError("session_failed", what, "Free some space; /save FILE writes a copy.") from error
        self.state.apply(record)

    def sync(self) -> None:
        """Writes the file through to the disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            what = f"The session {self.path.stem} is open in another terminal."
            raise QuireError("session_in_use", what, "Close it there, or start a new one.") from None

    def _cut_last_line(self) -> None:
        """Removes a last line without its end, which a kill can leave."""
        size = os.fstat(self._descriptor).st_size
        tail = os.pread(self._descriptor, min(size, MAX_LINE), max(0, size - MAX_LINE))
        if tail and not tail.endswith(b"\n"):
            os.ftruncate(self._descriptor, size - len(tail) + tail.rfind(b"\n") + 1)


def read_records(path: Path) -> tuple[list[Record], list[str]]:
    """Returns the records of a file, and one note for each line that is none."""
    records: list[Record] = []
    notes: list[str] = []
    if path.stat().st_size > MAX_FILE:
        raise QuireError("invalid_session", f"{path} has more than {MAX_FILE} bytes.", "Start a new session.")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line.decode("utf-8", "surrogatepass"))
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict):
                records.append(record)
            elif line.strip():
                notes.append(f"line {number} of {path.name} can't be read and was left out.")
    return records, notes
