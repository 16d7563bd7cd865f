"""`read_file`, `write_file`, `edit_file`, `list` and `search`: each call is a short process in the sandbox."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.agent.sandbox.output import clean_text
from quire.agent.sandbox.plan import SandboxLimits
from quire.agent.sandbox.run import ROOT, run_command
from quire.agent.tools.seam import Risk, ToolContext, ToolResult, object_schema
from quire.types import QuireError

_BOOT = (
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); from quire.agent.sandbox.child.files import main; sys.exit(main())"
)
_KEPT = 32 << 20
_SECONDS = 60.0
_PATH = {"type": "string", "description": "path, from the project folder"}


class FileTool:
    """One of the file tools. The operation itself is in `sandbox.child.files`."""

    def __init__(self, name: str, operation: str, risk: Risk, description: str, parameters: dict[str, Any]) -> None:
        self.name, self.description, self.parameters, self.risk = name, description, parameters, risk
        self._operation = operation

    def describe(self, arguments: Mapping[str, Any]) -> str:
        words = [str(arguments[name]) for name in ("pattern", "path") if arguments.get(name)]
        return " in ".join(words) or "."

    def preview(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult | None:
        if self.risk is not Risk.WRITE:
            return None
        return self._ask({**arguments, "dry": True}, context)

    def run(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        return self._ask(dict(arguments), context)

    def close(self) -> None:
        pass

    def _ask(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        sandbox = context.sandbox
        if sandbox is None:
            raise QuireError("no_sandbox", "There is no sandbox to work on files in.")
        limits = replace(sandbox.plan.limits, output_bytes=_KEPT, memory_bytes=1 << 30)
        plan = replace(sandbox.plan, limits=_without_waiting(limits))
        request = json.dumps({"operation": self._operation, "arguments": arguments}).encode()
        command = [os.path.realpath(sys.executable), "-I", "-S", "-c", _BOOT]
        done = run_command(
            plan, command, sandbox.program, data=request, cancelled=context.cancelled, kept=_KEPT, raw=True
        )
        if done.note:
            return ToolResult(f"[{done.note}]", True, note=done.note, seconds=done.seconds)
        try:
            reply = json.loads(done.output)
        except ValueError:
            return ToolResult(f"The file could not be worked on: {clean_text(done.output)[-500:]}", True)
        text, diff = clean_text(str(reply["text"])), clean_text(str(reply.get("diff", "")))
        return ToolResult(text, not reply["ok"], diff=diff, seconds=done.seconds)


def _without_waiting(limits: SandboxLimits) -> SandboxLimits:
    return replace(limits, seconds=min(limits.seconds, _SECONDS))


def file_tools() -> list[FileTool]:
    whole = {"type": "string", "description": "the whole text of the file"}
    return [
        FileTool(
            "read_file",
            "read",
            Risk.READ,
            "Read a text file. Lines are numbered; the numbers are not part of the file.",
            object_schema(
                ("path",),
                path=_PATH,
                start={"type": "integer", "description": "first line, from 1"},
                lines={"type": "integer", "description": "number of lines; default 2000"},
            ),
        ),
        FileTool(
            "write_file",
            "write",
            Risk.WRITE,
            "Write a whole text file. Missing folders are made.",
            object_schema(("path", "content"), path=_PATH, content=whole),
        ),
        FileTool(
            "edit_file",
            "edit",
            Risk.WRITE,
            "Replace an exact text in a file. `old` must stand there once, with its spaces and line breaks.",
            object_schema(
                ("path", "old", "new"),
                path=_PATH,
                old={"type": "string"},
                new={"type": "string"},
                all={"type": "boolean", "description": "replace every occurrence"},
            ),
        ),
        FileTool(
            "list",
            "list",
            Risk.READ,
            "List files and folders below a folder.",
            object_schema(
                (),
                path=_PATH,
                pattern={"type": "string", "description": "such as *.py"},
                depth={"type": "integer", "description": "levels; default 2"},
            ),
        ),
        FileTool(
            "search",
            "search",
            Risk.READ,
            "Search files for a regular expression.",
            object_schema(
                ("pattern",),
                pattern={"type": "string"},
                path=_PATH,
                files={"type": "string", "description": "only these, such as *.py"},
                ignore_case={"type": "boolean"},
            ),
        ),
    ]
