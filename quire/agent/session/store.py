"""Where sessions are kept, and how one is found again: by id, by the beginning of an id, or the last of a folder."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from quire.agent.session.records import is_from_user
from quire.types import QuireError

_LOOKED_AT = 1 << 18  # bytes of a file that are read for a list


@dataclass(frozen=True, slots=True)
class SessionEntry:
    """One line of a list of sessions."""

    id: str
    path: Path
    folder: str
    changed: float
    first_words: str


def state_folder() -> Path:
    base = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"
    return folder / "quire"


def sessions_folder() -> Path:
    return state_folder() / "sessions"


def list_sessions(folder: Path | None = None, *, project: str | None = None, most: int = 50) -> list[SessionEntry]:
    """Returns the newest sessions, of one project folder if it is given."""
    folder = folder or sessions_folder()
    found: list[SessionEntry] = []
    paths = [path for path in folder.glob("*.jsonl") if path.is_file()] if folder.is_dir() else []
    for path in sorted(paths, key=lambda one: one.stat().st_mtime, reverse=True):
        entry = _entry(path)
        if entry is not None and (project is None or entry.folder == project):
            found.append(entry)
        if len(found) == most:
            break
    return found


def find_session(name: str, folder: Path | None = None) -> Path:
    """Returns the file of a session by its id or the beginning of it, or a file's own path."""
    if "/" in name and Path(name).is_file():
        return Path(name)
    folder = folder or sessions_folder()
    if not name or "/" in name or name.startswith("."):
        raise QuireError("unknown_session", f"There is no session {name!r}.", "/sessions lists them.")
    found = sorted(path for path in folder.glob("*.jsonl") if path.stem.startswith(name))
    exact = [path for path in found if path.stem == name]
    if len(exact or found) == 1:
        return (exact or found)[0]
    what = f"There is no session {name!r}." if not found else f"{len(found)} sessions begin with {name!r}."
    raise QuireError("unknown_session", what, "`quire chat --list-sessions` lists them.")


def last_session(project: str, folder: Path | None = None) -> Path:
    found = list_sessions(folder, project=project, most=1)
    if not found:
        what = f"There is no earlier session in {project}."
        raise QuireError("unknown_session", what, "Start one without --continue.")
    return found[0].path


def _entry(path: Path) -> SessionEntry | None:
    """Reads the beginning of a file; None if it is no session."""
    try:
        with path.open("rb") as file:
            lines = file.read(_LOOKED_AT).splitlines()
        head = json.loads(lines[0])
        if head.get("type") != "session":
            return None
        changed = path.stat().st_mtime
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    words = ""
    for line in lines[1:]:
        try:
            message = json.loads(line).get("message")
        except (ValueError, AttributeError):
            break
        if isinstance(message, dict) and is_from_user(message):
            words = " ".join(str(message.get("content")).split())[:80]
            break
    return SessionEntry(str(head.get("id", path.stem)), path, str(head.get("folder", "")), changed, words)
