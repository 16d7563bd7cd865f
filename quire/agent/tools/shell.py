"""`shell`: one command line in the sandbox, in the project folder."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from typing import Any

from quire.agent.sandbox.output import clean_text
from quire.agent.sandbox.run import FinishedCommand, run_command
from quire.agent.tools.seam import Risk, ToolContext, ToolResult, object_schema
from quire.types import QuireError

DEFAULT_SECONDS, MAX_SECONDS = 120, 1800


class ShellTool:
    name = "shell"
    description = (
        "Run a command line with bash in the project folder and return its output. There is no network. "
        "/tmp is emptied after each call. Processes left in the background are ended."
    )
    parameters = object_schema(
        ("command",),
        command={"type": "string", "description": "the command line"},
        timeout={"type": "integer", "minimum": 1, "maximum": MAX_SECONDS, "description": "seconds; default 120"},
    )
    risk = Risk.RUN

    def describe(self, arguments: Mapping[str, Any]) -> str:
        return str(arguments["command"])

    def preview(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult | None:
        return None

    def run(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        sandbox = context.sandbox
        if sandbox is None:
            raise QuireError("no_sandbox", "There is no sandbox to run a command in.")
        seconds = min(float(arguments.get("timeout") or DEFAULT_SECONDS), MAX_SECONDS)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        show = context.on_output

        def on_output(data: bytes) -> None:
            if show is not None:
                show(clean_text(decoder.decode(data)))

        shell = ["/bin/bash", "-c", str(arguments["command"])]
        done = run_command(
            sandbox.plan, shell, sandbox.program, cancelled=context.cancelled, on_output=on_output, seconds=seconds
        )
        return command_result(done)

    def close(self) -> None:
        pass


def command_result(done: FinishedCommand) -> ToolResult:
    """Returns a finished command as a model reads it: its output, then what is not usual about its end."""
    lines = [done.output.rstrip()]
    if done.note:
        lines.append(f"[{done.note}]")
    elif done.exit_code != 0:
        lines.append(f"[exit code {done.exit_code}]")
    text = "\n".join(line for line in lines if line) or "[no output]"
    return ToolResult(text, done.exit_code != 0, done.exit_code, done.note, seconds=done.seconds)
