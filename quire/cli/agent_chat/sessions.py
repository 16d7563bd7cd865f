"""The list of saved sessions."""

from __future__ import annotations

import time

from quire.agent.session.store import list_sessions
from quire.cli.output import one_line


def session_lines(project: str | None = None) -> list[str]:
    """Returns one line per session, the newest first."""
    return [
        f"{entry.id}  {time.strftime('%Y-%m-%d %H:%M', time.localtime(entry.changed))}  "
        f"{one_line(entry.folder)}  {one_line(entry.first_words)}"
        for entry in list_sessions(project=project)
    ]


def show_sessions() -> int:
    print("\n".join(session_lines()) or "There are no saved sessions.")
    return 0
