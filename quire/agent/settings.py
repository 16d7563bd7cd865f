"""The user's own settings of the agent: MCP servers and hooks, in one JSON file of the configuration folder.

A project's files are never read for this: what runs outside the sandbox is the user's choice alone.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from quire.agent.hooks import ToolHook, read_hooks
from quire.agent.mcp.config import McpServerSpec, read_mcp_file
from quire.types import QuireError

PROJECT_FILE = ".mcp.json"


@dataclass(slots=True)
class AgentSettings:
    """What the files say, and a line for each thing in them that can't be used."""

    servers: list[McpServerSpec] = field(default_factory=list)
    hooks: list[ToolHook] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def settings_path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path.home() / ".config"
    return folder / "quire" / "agent.json"


def read_settings(files: tuple[Path, ...] = (), *, project: Path | None = None) -> AgentSettings:
    """Reads the user's settings, then the MCP servers of `files`; a later server of the same name wins."""
    settings = AgentSettings()
    servers: dict[str, McpServerSpec] = {}
    own = settings_path()
    for path in (*((own,) if own.is_file() else ()), *files):
        found, notes = read_mcp_file(path) if path != own or "mcpServers" in _parsed(own, settings) else ([], [])
        servers |= {spec.name: spec for spec in found}
        settings.notes += notes
    settings.servers = list(servers.values())
    if project is not None and (project / PROJECT_FILE).is_file() and not files:
        settings.notes.append(
            f"the project has {PROJECT_FILE}, which was not read: its servers would run outside the sandbox "
            f"(--mcp-config {PROJECT_FILE} starts them)."
        )
    return settings


def _parsed(path: Path, settings: AgentSettings) -> dict[str, object]:
    """Returns the user's file, and takes its hooks."""
    try:
        parsed = json.loads(path.read_bytes())
    except OSError as error:
        settings.notes.append(f"{path} can't be read: {error.strerror}.")
        return {}
    except (ValueError, RecursionError) as error:
        settings.notes.append(f"{path} is not JSON ({error}); no settings were taken from it.")
        return {}
    if not isinstance(parsed, dict):
        settings.notes.append(f"{path} is no object; no settings were taken from it.")
        return {}
    try:
        settings.hooks = read_hooks(parsed.get("hooks", []))
    except QuireError as error:  # a hook that blocks calls must not go missing
        raise QuireError(error.code, f"{path}: {error.what}", error.hint) from None
    return parsed
