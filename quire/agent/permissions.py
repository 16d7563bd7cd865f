"""Decides whether a call may run: by its risk, the mode, the user's allow-list, and what was approved in this session.

What was approved lives in this object only. It is never written to disk, so no other session inherits it.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from quire.agent.tools.seam import Risk, Tool, ToolResult
from quire.types import QuireError

_RULE = re.compile(r"(?P<tool>[\w:.*\-]+)(?:\((?P<words>.*)\))?\Z", re.DOTALL)
_SHELL_SYNTAX = frozenset(";|&`$()<>\n\\{}\"'*?[]~#!")


class Decision(Enum):
    ONCE = "once"
    SESSION = "session"  # this call again, and all like it
    NO = "no"


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """One call that waits for the user."""

    tool: str
    risk: Risk
    line: str  # the call in one line
    arguments: Mapping[str, Any]
    preview: ToolResult | None
    remembered_as: str  # what `Decision.SESSION` allows


@dataclass(frozen=True, slots=True)
class Approval:
    allowed: bool
    reason: str = ""  # for the model, if it was not allowed


AskUser = Callable[[ApprovalRequest], tuple[Decision, str]]  # the decision, and the user's words for the model


@dataclass(slots=True)
class Permissions:
    """The rules of one session."""

    allow: Sequence[str] = ()  # such as `shell(git status*)`, `edit_file`, `mcp__files__*`
    yes: bool = False  # all that runs inside the sandbox is allowed
    ask: AskUser | None = None  # None: no terminal for questions
    remembered: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for rule in self.allow:
            if _RULE.match(rule) is None:
                raise QuireError("usage", f"{rule!r} is no rule.", "It looks like edit_file or shell(git status*).")

    def decide(self, tool: Tool, arguments: Mapping[str, Any], preview: ToolResult | None = None) -> Approval:
        """Returns whether the call may run, and asks the user if the rules do not say."""
        if tool.risk is Risk.READ or (self.yes and tool.risk is not Risk.OUTSIDE) or self._is_allowed(tool, arguments):
            return Approval(True)
        key = memory_key(tool, arguments)
        if key in self.remembered:
            return Approval(True)
        if self.ask is None:
            hint = "nobody can be asked here" + ("" if tool.risk is Risk.OUTSIDE else ", and --yes was not given")
            return Approval(False, f"The call was not allowed: {hint}. --allow {tool.name} would allow it.")
        request = ApprovalRequest(tool.name, tool.risk, tool.describe(arguments), arguments, preview, key)
        decision, words = self.ask(request)
        if decision is Decision.NO:
            return Approval(False, f"The user did not allow this call{f': {words}' if words else '.'}")
        if decision is Decision.SESSION:
            self.remembered.add(key)
        return Approval(True)

    def forget(self) -> None:
        self.remembered.clear()

    def _is_allowed(self, tool: Tool, arguments: Mapping[str, Any]) -> bool:
        return any(_matches(rule, tool, arguments) for rule in self.allow)


def memory_key(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """Returns what an approval for the session covers: of the shell this very command, of other tools all calls."""
    return f"{tool.name}({tool.describe(arguments)})" if tool.name == "shell" else tool.name


def _matches(rule: str, tool: Tool, arguments: Mapping[str, Any]) -> bool:
    found = _RULE.match(rule)
    if found is None or not fnmatch.fnmatchcase(tool.name, found["tool"]):
        return False
    words = found["words"]
    if words is None:
        return True
    line = tool.describe(arguments)
    if words.endswith("*") and tool.risk is Risk.RUN:  # what follows may be words, not another command
        head = words[:-1]
        return line.startswith(head) and not set(line[len(head) :]) & _SHELL_SYNTAX
    return line == words if tool.risk is Risk.RUN else fnmatch.fnmatchcase(line, words)
