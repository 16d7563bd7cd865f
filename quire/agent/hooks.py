"""Programs or functions of the user that run before and after a tool's call.

A hook before a call may block it; one after it may add a line to the result. A program gets the call as JSON on stdin;
exit code 2 blocks, and what it prints is the reason. ToolHooks come from the user's own configuration, never from the
project folder, and run outside the sandbox.
"""

from __future__ import annotations

import fnmatch
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from quire.agent.sandbox.output import clean_text
from quire.agent.tools.seam import ToolResult
from quire.types import QuireError

SECONDS = 30.0
MAX_PRINTED = 4000
_BLOCKED = 2  # exit code

HookFunction = Callable[[dict[str, Any]], str | None]  # returns a reason or a note, or None


@dataclass(frozen=True, slots=True)
class ToolHook:
    """One hook: when it runs, for which tools, and what it runs."""

    event: str  # before or after
    tools: str  # a pattern of tool names
    run: HookFunction | tuple[str, ...]


@dataclass(slots=True)
class ToolHooks:
    """All hooks of a session."""

    hooks: Sequence[ToolHook] = field(default_factory=tuple)

    def before(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Returns why the call is blocked; empty if it is not. A hook that fails blocks the call."""
        for hook in self._of("before", tool):
            reason = _run(hook, {"event": "before", "tool": tool, "arguments": dict(arguments)}, blocks=True)
            if reason:
                return reason
        return ""

    def after(self, tool: str, arguments: Mapping[str, Any], result: ToolResult) -> str:
        """Returns what hooks add to the result."""
        given = {
            "event": "after",
            "tool": tool,
            "arguments": dict(arguments),
            "output": result.content,
            "exit_code": result.exit_code,
            "is_error": result.is_error,
        }
        return "\n".join(note for hook in self._of("after", tool) if (note := _run(hook, given, blocks=False)))

    def _of(self, event: str, tool: str) -> list[ToolHook]:
        return [hook for hook in self.hooks if hook.event == event and fnmatch.fnmatchcase(tool, hook.tools)]


def read_hooks(entries: Any) -> list[ToolHook]:
    """Returns the hooks of a configuration file's list."""
    if not isinstance(entries, list):
        raise QuireError("invalid_config", "hooks must be a list.", "docs/agent.md has an example.")
    hooks = []
    for index, entry in enumerate(entries):
        command = entry.get("command") if isinstance(entry, dict) else None
        words = [command] if isinstance(command, str) else command
        if not _are_words(words) or entry.get("event") not in ("before", "after"):
            what = f"hooks[{index}] needs an event (before or after) and a command (a list of words)."
            raise QuireError("invalid_config", what, "docs/agent.md has an example.")
        hooks.append(ToolHook(entry["event"], str(entry.get("tools", "*")), tuple(words)))
    return hooks


def _are_words(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and bool(value) and all(isinstance(word, str) and word for word in value)


def _run(hook: ToolHook, given: dict[str, Any], *, blocks: bool) -> str:
    if callable(hook.run):
        try:
            return hook.run(given) or ""
        except Exception as error:
            return f"the hook failed: {type(error).__name__}: {error}"
    try:
        done = subprocess.run(
            hook.run,
            input=json.dumps(given).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"the hook {hook.run[0]} did not end within {SECONDS:.0f} s"
    except OSError as error:
        return f"the hook {hook.run[0]} can't be run: {error.strerror}"
    printed = clean_text(done.stdout[:MAX_PRINTED].decode("utf-8", "replace")).strip()
    if done.returncode == 0:
        return "" if blocks else printed
    if blocks and done.returncode != _BLOCKED:
        return f"the hook {hook.run[0]} ended with code {done.returncode}: {printed}"
    return printed or f"the hook {hook.run[0]} said no"
