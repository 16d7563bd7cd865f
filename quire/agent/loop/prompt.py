"""Writes a session's system message: what the agent is, where it works, and the project's own AGENTS.md.

It is written once, at the start of a session, and kept in its file: a resumed session begins with the same bytes, so
that the engine's prefix cache knows them.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.types import QuireError

AGENTS_FILE = "AGENTS.md"
MAX_AGENTS = 32 << 10  # characters

_BASE = """You are a careful assistant that works in a terminal, in the folder {folder}, on {system}. Today is {date}.

- Use the tools to look, change and run things. Do not guess what a file holds: read it.
- Make the smallest change that does what was asked. Afterwards check it: run the tests, or run the program.
- If a call fails, read its message, and try another way instead of the same call again.
- Answer briefly, in Markdown. Say what you did and what you did not do."""
_PLAIN = "You are a helpful assistant. Answer briefly, in Markdown."
_TOOLS_BY_PROMPT = """

You can call these tools. To call one, answer with nothing but one JSON object:
{{"name": "<tool>", "arguments": {{...}}}}
You get its result as the next message, and then go on. When you are done, answer in plain text.

{tools}"""


def write_system_message(
    folder: Path, *, has_tools: bool, own: str | None = None, date: str | None = None
) -> tuple[str, list[str]]:
    """Returns the system message and notes for the user. `own` replaces the part that is not the project's."""
    date = date or time.strftime("%Y-%m-%d")
    base = _BASE.format(folder=folder, system=platform.system(), date=date) if has_tools else _PLAIN
    text, notes = read_agents_file(folder)
    parts = [own if own is not None else base]
    if text:
        parts.append(f"The project says in {AGENTS_FILE}:\n\n{text}")
    return "\n\n".join(part for part in parts if part), notes


def read_agents_file(folder: Path) -> tuple[str, list[str]]:
    """Returns AGENTS.md of the folder. A link that leads out of the folder is not followed, since what it holds would
    be sent to the model."""
    path = folder / AGENTS_FILE
    if not path.is_file():
        return "", []
    if not path.resolve().is_relative_to(folder.resolve()):
        return "", [f"{AGENTS_FILE} is a link out of the project folder and was not read."]
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError as error:
        return "", [f"{AGENTS_FILE} could not be read: {error.strerror}."]
    if len(text) > MAX_AGENTS:
        return text[:MAX_AGENTS], [f"{AGENTS_FILE} has {len(text)} characters; the first {MAX_AGENTS} were read."]
    return text, []


def describe_tools(tools: Sequence[dict[str, Any]]) -> str:
    """Returns the tools as text, for a model whose chat template knows none."""
    lines = []
    for tool in tools:
        function = tool["function"]
        lines.append(f"- {function['name']}: {function['description']} Arguments: {json.dumps(function['parameters'])}")
    return _TOOLS_BY_PROMPT.format(tools="\n".join(lines))


def attach_files(text: str, folder: Path, *, most: int = 64 << 10) -> str:
    """Returns the message with the text of each `@file` in it behind it. Raises `QuireError` for one that can't be
    read; a word that names no file stays as it is."""
    import re

    attached = []
    for word in re.findall(r"(?<!\S)@([^\s@]+)", text):
        path = (folder / word).resolve()
        if not path.is_file():
            continue
        if not path.is_relative_to(folder.resolve()):
            raise QuireError("invalid_file", f"{word} lies outside of the project folder.", "Copy it into the folder.")
        data = path.read_bytes()[: most + 1]
        if b"\0" in data:
            raise QuireError("invalid_file", f"{word} is a binary file.", "Attach text.")
        body = data[:most].decode("utf-8", "replace")
        more = f"\n[… cut after {most} bytes]" if len(data) > most else ""
        attached.append(f'<file path="{word}">\n{body}{more}\n</file>')
    return "\n\n".join([text, *attached])
