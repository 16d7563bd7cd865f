"""`python`: code in an interpreter that lives as long as the session and keeps its variables, in the sandbox."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.agent.sandbox.choose import Sandbox
from quire.agent.sandbox.output import clean_text
from quire.agent.sandbox.run import ROOT, SandboxProcess, describe_reason
from quire.agent.tools.seam import Risk, ToolContext, ToolResult, object_schema
from quire.types import QuireError

_BOOT = f"import sys; sys.path.append({str(ROOT)!r}); from quire.agent.sandbox.child.interpreter import main; main()"
MAX_REPLY = 8 << 20
DEFAULT_SECONDS, MAX_SECONDS = 120, 1800


class PythonTool:
    name = "python"
    description = (
        "Run Python code in an interpreter that keeps its variables for the whole session, in the project folder. "
        "Returns what is printed and the value of a last expression. There is no network."
    )
    parameters = object_schema(
        ("code",),
        code={"type": "string", "description": "Python code"},
        timeout={"type": "integer", "minimum": 1, "maximum": MAX_SECONDS, "description": "seconds; default 120"},
    )
    risk = Risk.RUN

    def __init__(self) -> None:
        self._process: SandboxProcess | None = None

    def describe(self, arguments: Mapping[str, Any]) -> str:
        return str(arguments["code"])

    def preview(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult | None:
        return None

    def run(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        if context.sandbox is None:
            raise QuireError("no_sandbox", "There is no sandbox to run Python in.")
        started = time.monotonic()
        process = self._running(context.sandbox)
        seconds = min(float(arguments.get("timeout") or DEFAULT_SECONDS), MAX_SECONDS)
        stdin = process.popen.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps({"code": str(arguments["code"])}).encode() + b"\n")
            stdin.flush()
            reply, reason = _reply(process, context, started + seconds)
        except OSError:
            reply, reason = None, ""
        spent = time.monotonic() - started
        if reply is not None:
            text = clean_text(str(reply["text"])).rstrip() or "[no output]"
            return ToolResult(text, not reply["ok"], 0 if reply["ok"] else 1, seconds=spent)
        note = self._end(reason, seconds)
        return ToolResult(f"[{note}; the interpreter's variables are lost]", True, note=note, seconds=spent)

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _running(self, sandbox: Sandbox) -> SandboxProcess:
        if self._process is None:
            limits = replace(sandbox.plan.limits, cpu_seconds=None)  # of the whole session; each call has its time
            plan = replace(sandbox.plan, limits=limits)
            command = [sys.executable, "-c", _BOOT]
            self._process = SandboxProcess(plan, command, sandbox.program, takes_input=True)
        return self._process

    def _end(self, reason: str, seconds: float) -> str:
        """Ends an interpreter that can't go on, and returns why in words."""
        process = self._process
        assert process is not None
        process.end()
        report = process.report()
        reason = reason or str(report.get("reason", ""))
        note = describe_reason(reason, process.plan, seconds)
        self.close()
        return note or str(report.get("error") or f"the interpreter ended with code {report.get('exit')}")


def _reply(process: SandboxProcess, context: ToolContext, deadline: float) -> tuple[dict[str, Any] | None, str]:
    """Waits for the reply of one call. Returns it, or why there is none."""
    stdout = process.popen.stdout
    assert stdout is not None
    data = b""
    while not data.endswith(b"\n"):
        if context.cancelled.is_set():
            return None, "cancelled"
        left = deadline - time.monotonic()
        if left <= 0:
            return None, "time"
        if select.select([stdout.fileno()], [], [], min(0.05, left))[0]:
            part = os.read(stdout.fileno(), 1 << 16)
            data += part
            if not part or len(data) > MAX_REPLY:
                return None, "" if not part else "output"
    try:
        reply = json.loads(data)
    except ValueError:
        return None, ""
    return (reply, "") if isinstance(reply, dict) and "text" in reply and "ok" in reply else (None, "")
