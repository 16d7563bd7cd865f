"""Completes slash commands and the paths of `@file`. Independent of the line editor."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

MOST = 50


class CompletionChoice(NamedTuple):
    """One way to go on: `text` replaces the last `replaced` characters before the cursor."""

    text: str
    replaced: int


def complete_line(before: str, folder: Path, commands: Iterable[str]) -> list[CompletionChoice]:
    """Returns the choices for the text before the cursor."""
    if before.startswith("/") and not any(char.isspace() for char in before):
        return [CompletionChoice(f"/{name}", len(before)) for name in commands if f"/{name}".startswith(before)]
    word = before.split()[-1] if before and not before[-1].isspace() else ""
    return _paths(word[1:], folder) if word.startswith("@") else []


def _paths(typed: str, folder: Path) -> list[CompletionChoice]:
    head, slash, name = typed.rpartition("/")
    place = (folder / head).resolve()
    if not place.is_relative_to(folder.resolve()) or not place.is_dir():
        return []
    found = []
    try:
        entries = sorted(os.scandir(place), key=lambda entry: entry.name)
    except OSError:
        return []
    for entry in entries:
        is_hidden = entry.name.startswith(".") and not name.startswith(".")
        if not entry.name.startswith(name) or is_hidden or any(char.isspace() for char in entry.name):
            continue
        end = "/" if entry.is_dir() else ""
        found.append(CompletionChoice(f"@{head}{slash}{entry.name}{end}", len(typed) + 1))
    return found[:MOST]
