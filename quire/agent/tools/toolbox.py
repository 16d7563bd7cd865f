"""The tools of a session by name, and the choice of them by the user."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from quire.agent.tools.files import file_tools
from quire.agent.tools.python import PythonTool
from quire.agent.tools.seam import Tool, as_schema
from quire.agent.tools.shell import ShellTool
from quire.agent.tools.web import WebFetchTool
from quire.types import QuireError

MAX_TOOLS = 128
OFF_BY_DEFAULT = ("web_fetch",)


class Toolbox:
    """Tools with unique names."""

    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            self.add(tool)

    def add(self, tool: Tool) -> None:
        if tool.name in self._tools:
            raise QuireError("invalid_tool", f"Two tools have the name {tool.name!r}.", "Rename one of them.")
        if len(self._tools) == MAX_TOOLS:
            raise QuireError("invalid_tool", f"There are more than {MAX_TOOLS} tools.", "Choose some with --tools.")
        self._tools[tool.name] = tool

    def remove(self, name: str) -> None:
        tool = self._tools.pop(name, None)
        if tool is not None:
            tool.close()

    def get(self, name: str) -> Tool | None:
        return self._tools.get(name)

    @property
    def all(self) -> list[Tool]:
        return list(self._tools.values())

    def schemas(self) -> list[dict[str, Any]]:
        return [as_schema(tool) for tool in self._tools.values()]

    def close(self) -> None:
        for tool in self._tools.values():
            with suppress(QuireError, OSError):
                tool.close()


def built_in_tools() -> list[Tool]:
    return [ShellTool(), PythonTool(), *file_tools(), WebFetchTool()]


def choose_tools(names: Sequence[str] | None) -> list[Tool]:
    """Returns the built-in tools with these names. None: those that are on by default; `all` and `none` are names."""
    tools = {tool.name: tool for tool in built_in_tools()}
    if names is None:
        return [tool for name, tool in tools.items() if name not in OFF_BY_DEFAULT]
    if "none" in names:
        return []
    unknown = [name for name in names if name != "all" and name not in tools]
    if unknown:
        hint = f"Choose from {', '.join(tools)}, all and none."
        raise QuireError("usage", f"There is no tool {unknown[0]!r}.", hint)
    wanted = set(names) | ({name for name in tools if name not in OFF_BY_DEFAULT} if "all" in names else set())
    return [tool for name, tool in tools.items() if name in wanted]
