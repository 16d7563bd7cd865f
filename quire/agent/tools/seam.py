"""The protocol of a tool: a name, a JSON schema, a risk that decides who is asked, and a way to run it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from quire.agent.sandbox.choose import Sandbox


class Risk(Enum):
    """What a call can do, and so whether it needs approval."""

    READ = "read"  # inside the sandbox, and changes nothing
    WRITE = "write"  # inside the sandbox, and changes files of the project
    RUN = "run"  # inside the sandbox, and runs a program
    OUTSIDE = "outside"  # outside the sandbox: the web, a server's tool, a Python function


@dataclass(slots=True)
class ToolResult:
    """The result of a call. `content` is for the model, the rest for people and programs."""

    content: str
    is_error: bool = False
    exit_code: int | None = None
    note: str = ""  # the limit that ended the call
    diff: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class ToolContext:
    """What a call may use."""

    cancelled: threading.Event = field(default_factory=threading.Event)
    on_output: Callable[[str], None] | None = None
    sandbox: Sandbox | None = None


class Tool(Protocol):
    """Something a model may call."""

    name: str
    description: str
    parameters: dict[str, Any]  # a JSON schema of type object
    risk: Risk

    def describe(self, arguments: Mapping[str, Any]) -> str:
        """Returns the call in one line, for a person: a command, a path."""
        ...

    def preview(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult | None:
        """Returns what the call would change, before anyone is asked; None if that can't be told. An error means that
        the call can't succeed, and no approval is requested."""
        ...

    def run(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Runs the call. Raises nothing that a model can cause."""
        ...

    def close(self) -> None: ...


def as_schema(tool: Tool) -> dict[str, Any]:
    """Returns the tool in OpenAI's form."""
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
    }


def object_schema(required: tuple[str, ...], **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
