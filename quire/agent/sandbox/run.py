"""Starts sandboxed processes and reads what they print, within the plan's bounds on time and output.

`SandboxProcess` is one running process with a lifeline: closing it ends everything inside the sandbox. `run_command`
runs one command to its end. Called by the tools, from worker threads.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quire.agent.sandbox.bubblewrap import bubblewrap_arguments
from quire.agent.sandbox.output import KeptOutput
from quire.agent.sandbox.plan import SandboxPlan
from quire.types import QuireError

ROOT = Path(__file__).resolve().parents[3]
_BOOT = (
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
    "from quire.agent.sandbox.child.launch import main; sys.exit(main())"
)
_POLL_SECONDS = 0.05
_END_SECONDS = 5.0  # a process is killed from outside this long after its lifeline was closed
# How the report of the supervisor reads for a person. {0} is a limit's value.
REASONS = {
    "time": "ended after {0:g} s, the time limit",
    "output": "ended after more than {0} bytes of output",
    "memory": "ended for using more than {0} bytes of memory",
    "processes": "ended for having more than {0} processes",
    "cpu": "ended after {0} s of processor time",
    "file size": "ended for writing a file of more than {0} bytes",
    "cancelled": "interrupted",
}


@dataclass(frozen=True, slots=True)
class FinishedCommand:
    exit_code: int
    output: str
    num_bytes: int
    seconds: float
    reason: str = ""  # a key of REASONS if a limit or the user ended it
    note: str = ""  # the reason in words


class SandboxProcess:
    """One process in the sandbox. `program` is bubblewrap's path, or None to use the native launcher."""

    def __init__(self, plan: SandboxPlan, command: Sequence[str], program: str | None, *, takes_input: bool) -> None:
        inside, self._lifeline = os.pipe()
        self._status, reports = os.pipe()
        settings = plan.as_json()
        if program is not None:
            settings |= {"namespaces": [], "mounts": []}
        given = _in_memory(json.dumps(settings).encode())
        options = _in_memory(bubblewrap_arguments(plan)) if program is not None else -1
        around = [program, "--args", str(options)] if program is not None else []
        python = [os.path.realpath(sys.executable), "-I", "-S", "-c", _BOOT]
        passed = [given, inside, reports, *([options] if program is not None else [])]
        self.plan = plan
        try:
            self.popen = subprocess.Popen(
                [*around, *python, str(given), str(inside), str(reports), *command],
                stdin=subprocess.PIPE if takes_input else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=passed,
                env={"PATH": "/usr/bin:/bin"},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise sandbox_failed(str(error)) from error
        finally:
            for descriptor in passed:
                os.close(descriptor)

    def end(self) -> None:
        """Ends everything in the sandbox and waits until it has gone."""
        self._close_lifeline()
        try:
            self.popen.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()

    def report(self) -> dict[str, object]:
        """Returns the supervisor's report after the process has ended: exit code and reason."""
        os.set_blocking(self._status, False)
        data = b""
        with suppress(BlockingIOError):
            while part := os.read(self._status, 1 << 16):
                data += part
        lines = [line for line in data.splitlines() if line.strip()]
        for line in lines:
            with suppress(ValueError):
                found: dict[str, object] = json.loads(line)
                return found
        return {}

    def close(self) -> None:
        self.end()
        os.close(self._status)
        for stream in (self.popen.stdin, self.popen.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    def _close_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


def run_command(
    plan: SandboxPlan,
    command: Sequence[str],
    program: str | None,
    *,
    data: bytes | None = None,
    cancelled: threading.Event | None = None,
    on_output: Callable[[bytes], None] | None = None,
    seconds: float | None = None,
    kept: int | None = None,
    raw: bool = False,
) -> FinishedCommand:
    """Runs a command to its end. `data` is its standard input, `kept` how many bytes of each end of its output stay.
    `raw`: the output is not cleaned for a terminal."""
    limit = plan.limits.seconds if seconds is None else min(seconds, plan.limits.seconds)
    output = KeptOutput() if kept is None else KeptOutput(kept)
    started = time.monotonic()
    process = SandboxProcess(plan, command, program, takes_input=data is not None)
    try:
        feeder = _feed(process, data)
        reason = _pump(process, output, plan, started + limit, cancelled, on_output)
        if feeder is not None and reason:
            process.end()  # the feeder's pipe breaks
        process.end() if reason else process.popen.wait()
        report = process.report()
    finally:
        process.close()
    spent = time.monotonic() - started
    if report.get("reason") == "sandbox" or (not report and not reason and process.popen.returncode != 0):
        raise sandbox_failed(str(report.get("error", output.text()[:300])))
    reason = reason or str(report.get("reason", ""))
    if reason == "start":
        return FinishedCommand(127, str(report.get("error", "")), 0, spent)
    code = report.get("exit", process.popen.returncode)
    return FinishedCommand(
        code if isinstance(code, int) and not reason else -9 if reason else 1,
        output.raw_text() if raw else output.text(),
        output.num_bytes,
        spent,
        reason,
        describe_reason(reason, plan, limit),
    )


def describe_reason(reason: str, plan: SandboxPlan, seconds: float) -> str:
    limits = plan.limits
    values = {
        "time": seconds,
        "output": limits.output_bytes,
        "memory": limits.memory_bytes,
        "processes": limits.processes,
        "cpu": limits.cpu_seconds,
        "file size": limits.file_bytes,
    }
    return REASONS[reason].format(values.get(reason)) if reason in REASONS else ""


def sandbox_failed(what: str) -> QuireError:
    hint = "`quire chat --tools none` works without tools; docs/agent.md says what the sandbox needs."
    return QuireError("sandbox_failed", f"The sandbox could not be set up: {what.strip() or 'no reason given'}.", hint)


def _in_memory(data: bytes) -> int:
    """Returns a descriptor of a file in memory, so that the plan does not show in lists of processes."""
    descriptor = os.memfd_create("plan")
    os.write(descriptor, data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _feed(process: SandboxProcess, data: bytes | None) -> threading.Thread | None:
    """Writes the input in a thread of its own, since a command may print before it has read everything."""
    stream = process.popen.stdin
    if stream is None or data is None:
        return None

    def write() -> None:
        with suppress(OSError, ValueError):
            stream.write(data)
            stream.close()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    return thread


def _pump(
    process: SandboxProcess,
    output: KeptOutput,
    plan: SandboxPlan,
    deadline: float,
    cancelled: threading.Event | None,
    on_output: Callable[[bytes], None] | None,
) -> str:
    """Reads until the output ends. Returns why the command must be ended; empty if it ended by itself."""
    stream = process.popen.stdout
    assert stream is not None
    descriptor = stream.fileno()
    while True:
        if cancelled is not None and cancelled.is_set():
            return "cancelled"
        left = deadline - time.monotonic()
        if left <= 0:
            return "time"
        ready, _, _ = select.select([descriptor], [], [], min(_POLL_SECONDS, left))
        if not ready:
            continue
        data = os.read(descriptor, 1 << 16)
        if not data:
            return ""
        output.add(data)
        if on_output is not None:
            on_output(data)
        if output.num_bytes > plan.limits.output_bytes:
            return "output"
