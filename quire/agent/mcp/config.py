"""Reads MCP servers from a JSON file of the shape that other agents use: `{"mcpServers": {name: {...}}}`.

An entry with an error is reported and left out; the others are used.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quire.types import QuireError

MAX_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-]{0,31}\Z")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_HTTP_TYPES = ("http", "streamable-http", "streamable_http", "streamableHttp")


@dataclass(frozen=True, slots=True)
class McpServerSpec:
    """How one server is reached: a command with pipes, or a URL."""

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


def read_mcp_file(path: Path) -> tuple[list[McpServerSpec], list[str]]:
    """Returns the servers of a file, and a line for each entry that can't be used."""
    try:
        data = path.read_bytes()[: MAX_BYTES + 1]
    except OSError as error:
        return [], [f"{path} can't be read: {error.strerror}; no MCP servers were taken from it."]
    if len(data) > MAX_BYTES:
        return [], [f"{path} has more than {MAX_BYTES} bytes; no MCP servers were taken from it."]
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        return [], [f"{path} is not JSON ({error}); no MCP servers were taken from it."]
    entries = parsed.get("mcpServers") if isinstance(parsed, dict) else None
    if not isinstance(entries, dict):
        return [], [f"{path} has no object mcpServers; no MCP servers were taken from it."]
    specs, problems = [], []
    for name, entry in entries.items():
        try:
            specs.append(_spec(name, entry, os.environ))
        except QuireError as error:
            problems.append(f"the MCP server {name!r:.60} of {path.name} was left out: {error.what}")
    return specs, problems


def _spec(name: str, entry: Any, variables: Mapping[str, str]) -> McpServerSpec:
    if not _NAME.match(name):
        raise _wrong("its name may have 32 letters, digits, hyphens and underscores.")
    if not isinstance(entry, dict):
        raise _wrong("it is no object.")
    kind = entry.get("type") or entry.get("transport") or ("stdio" if "command" in entry else "http")
    if kind in _HTTP_TYPES:
        url = _filled(_text(entry, "url"), variables)
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise _wrong(f"{url!r:.100} is no URL.")
        return McpServerSpec(name, url=url, headers=_texts(entry, "headers", variables))
    if kind != "stdio":
        raise _wrong(f"its type {kind!r:.40} is neither stdio nor http.")
    args = entry.get("args", [])
    if not isinstance(args, list) or not all(isinstance(one, str) for one in args):
        raise _wrong("args must be a list of texts.")
    folder = entry.get("cwd") or ""
    if not isinstance(folder, str):
        raise _wrong("cwd must be a text.")
    command = _filled(_text(entry, "command"), variables)
    filled = tuple(_filled(one, variables) for one in args)
    return McpServerSpec(name, command, filled, _texts(entry, "env", variables), _filled(folder, variables))


def _text(entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value:
        raise _wrong(f"it needs {key}, a text.")
    return value


def _texts(entry: Mapping[str, Any], key: str, variables: Mapping[str, str]) -> dict[str, str]:
    values = entry.get(key) or {}
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise _wrong(f"{key} must be an object of texts.")
    return {name: _filled(value, variables) for name, value in values.items()}


def _filled(text: str, variables: Mapping[str, str]) -> str:
    """Puts variables of the environment in the place of `${NAME}` and `${NAME:-default}`."""

    def value(found: re.Match[str]) -> str:
        if found[1] in variables:
            return variables[found[1]]
        if found[2] is None:
            raise _wrong(f"the variable {found[1]} is not set.")
        return found[2]

    return _VARIABLE.sub(value, text)


def _wrong(what: str) -> QuireError:
    return QuireError("invalid_config", what)
