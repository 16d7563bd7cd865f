"""What MCP servers offer, as tools. They run in the servers, outside the sandbox, so each call needs approval.

Names, descriptions and schemas come from the servers: they are bounded, and cleaned before they are shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from quire.agent.mcp.host import McpHost
from quire.agent.sandbox.output import clean_text
from quire.agent.tools.seam import Risk, ToolContext, ToolResult
from quire.text.schema.normal import normalise
from quire.types import QuireError

MAX_DESCRIPTION = 2000
MAX_SCHEMA = 32 << 10
_NAME = re.compile(r"[A-Za-z0-9_\-]{1,64}\Z")


class McpTool:
    """One tool of a server."""

    risk = Risk.OUTSIDE

    def __init__(self, host: McpHost, server: str, offered: Any) -> None:
        schema = offered.input_schema
        self.name = f"mcp__{server}__{offered.name}"
        self.description = clean_text(str(offered.description or offered.title or offered.name))[:MAX_DESCRIPTION]
        self.parameters: dict[str, Any] = {"properties": {}, **schema, "type": "object"}
        self._host, self.server, self._tool = host, server, str(offered.name)

    def describe(self, arguments: Mapping[str, Any]) -> str:
        return json.dumps(dict(arguments), ensure_ascii=False) if arguments else ""

    def preview(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult | None:
        return None

    def run(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        result = self._host.call(self.server, self._tool, dict(arguments), context.cancelled)
        return ToolResult(_text(result), bool(result.is_error))

    def close(self) -> None:
        pass  # the host ends the servers


def mcp_tools(host: McpHost) -> tuple[list[McpTool], list[str]]:
    """Returns the tools of all servers, and a line for each server or tool that can't be used."""
    tools: list[McpTool] = []
    notes: list[str] = []
    for name, one in host.connections.items():
        if not one.is_up:
            notes.append(f"the MCP server {name} is not there: {one.problem}.")
        for offered in one.offered:
            try:
                tools.append(_checked(host, name, offered))
            except QuireError as error:
                notes.append(f"a tool of the MCP server {name} was left out: {error.what}")
    return tools, notes


def _checked(host: McpHost, server: str, offered: Any) -> McpTool:
    shown = clean_text(str(offered.name))[:60]
    schema = offered.input_schema
    if not _NAME.match(f"mcp__{server}__{offered.name}"):
        raise QuireError("invalid_tool", f"the name {shown!r} is long, or not of letters, digits, - and _.")
    if not isinstance(schema, dict) or not isinstance(schema.get("properties", {}), dict):
        raise QuireError("invalid_tool", f"{shown} has no schema of an object.")
    if len(json.dumps(schema)) > MAX_SCHEMA:
        raise QuireError("invalid_tool", f"the schema of {shown} has more than {MAX_SCHEMA} characters.")
    normalise(schema, strict=False)
    return McpTool(host, server, offered)


def _text(result: Any) -> str:
    """Returns a result as the model reads it: texts, and a word for what is none."""
    parts = []
    for block in result.content:
        kind = getattr(block, "type", "")
        if kind == "text":
            parts.append(clean_text(block.text))
        elif kind == "resource" and isinstance(getattr(block.resource, "text", None), str):
            parts.append(clean_text(block.resource.text))
        elif kind == "resource_link":
            parts.append(f"[a link to {clean_text(str(block.uri))[:500]}]")
        else:
            parts.append(f"[{kind or 'something'} that can't be shown as text]")
    if not parts and result.structured_content is not None:
        parts.append(clean_text(json.dumps(result.structured_content, ensure_ascii=False)))
    return "\n".join(parts) or "[no output]"
