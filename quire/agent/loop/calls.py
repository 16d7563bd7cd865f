"""Runs the calls of one answer: approval, hooks, the tool itself, and the result as the model gets it.

Calls that only read run side by side; all others run in the order in which the model wrote them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.agent.hooks import ToolHooks
from quire.agent.loop.events import Event, ItemStream, item_type
from quire.agent.permissions import Permissions
from quire.agent.repair.reading import ReadyCall
from quire.agent.sandbox.choose import Sandbox
from quire.agent.sandbox.output import clean_text, trim_text
from quire.agent.tools.seam import Risk, Tool, ToolContext, ToolResult
from quire.agent.tools.toolbox import Toolbox
from quire.types import QuireError

MAX_PARALLEL = 8
_STOP_SECONDS = 10.0  # time in which calls must end after Ctrl-C
INTERRUPTED = "The user interrupted this call."
ABANDONED = "The user interrupted this call, and it did not end; it may still be running."


@dataclass(slots=True)
class CallRunner:
    """Runs calls for one session."""

    toolbox: Toolbox
    permissions: Permissions
    sandbox: Sandbox | None
    hooks: ToolHooks
    items: ItemStream
    max_result: int = 30_000  # characters

    def run(
        self,
        calls: Sequence[ReadyCall],
        on_start: Callable[[ReadyCall], None],
        on_end: Callable[[ReadyCall, ToolResult], None],
    ) -> bool:
        """Runs all calls. `on_start` and `on_end` are called in this thread, in the order of the calls. Returns False
        if the user interrupted; the calls that did not run then have a result that says so."""
        waiting = list(calls)
        while waiting:
            batch = self._next_batch(waiting)
            del waiting[: len(batch)]
            for call in batch:
                on_start(call)
            if self._run_batch(batch, on_end):
                for call in waiting:
                    on_end(call, ToolResult(INTERRUPTED, True))
                return False
        return True

    def _next_batch(self, waiting: Sequence[ReadyCall]) -> list[ReadyCall]:
        batch: list[ReadyCall] = []
        for call in waiting[:MAX_PARALLEL]:
            tool = self.toolbox.get(call.name)
            if tool is None or tool.risk is not Risk.READ:
                break
            batch.append(call)
        return batch or [waiting[0]]

    def _run_batch(self, batch: Sequence[ReadyCall], on_end: Callable[[ReadyCall, ToolResult], None]) -> bool:
        """Runs calls side by side. Returns whether the user interrupted."""
        cancelled = threading.Event()
        items = [self._begin(call) for call in batch]
        approved: list[ToolResult | None] = []
        interrupted = False
        for call in batch:
            try:
                approved.append(ToolResult(INTERRUPTED, True) if interrupted else self._approve(call, cancelled))
            except KeyboardInterrupt:
                interrupted = True
                approved.append(ToolResult(INTERRUPTED, True))
        jobs = [
            None if refused is not None else _ToolThread(self, call, item, cancelled)
            for call, item, refused in zip(batch, items, approved, strict=True)
        ]
        interrupted |= _wait([job for job in jobs if job is not None], cancelled)
        for call, item, refused, job in zip(batch, items, approved, jobs, strict=True):
            ended = refused or (job.result if job is not None else None)
            result = self._trimmed(ended or ToolResult(ABANDONED, True))
            on_end(call, result)  # keeps it before it is shown, so that a kill loses nothing that was seen
            self._finish(item, result)
        return interrupted

    def _begin(self, call: ReadyCall) -> Event:
        tool = self.toolbox.get(call.name)
        line = clean_text(tool.describe(call.arguments)) if tool is not None else ""
        return self.items.start(
            item_type(call.name), tool=call.name, command=line, arguments=call.arguments, status="in_progress"
        )

    def _approve(self, call: ReadyCall, cancelled: threading.Event) -> ToolResult | None:
        """Returns why the call must not run; None if it may."""
        tool = self.toolbox.get(call.name)
        if tool is None:
            return ToolResult(f"There is no tool {call.name!r}.", True)
        if tool.risk is not Risk.OUTSIDE and self.sandbox is None:
            return ToolResult("There is no sandbox here, so this tool does not run.", True)
        blocked = self.hooks.before(call.name, call.arguments)
        if blocked:
            return ToolResult(f"A hook blocked this call: {blocked}", True)
        preview = self._preview(tool, call, cancelled)
        if preview is not None and preview.is_error:
            return preview
        approval = self.permissions.decide(tool, call.arguments, preview)
        return None if approval.allowed else ToolResult(approval.reason, True)

    def _preview(self, tool: Tool, call: ReadyCall, cancelled: threading.Event) -> ToolResult | None:
        try:
            return tool.preview(call.arguments, ToolContext(cancelled, None, self.sandbox))
        except QuireError as error:
            return ToolResult(str(error), True)

    def call_tool(self, call: ReadyCall, item: Event, cancelled: threading.Event) -> ToolResult:
        """In a thread of its own: runs the tool. Whatever it raises is a result."""
        tool = self.toolbox.get(call.name)
        assert tool is not None
        started = time.monotonic()
        context = ToolContext(cancelled, lambda text: self.items.update(item, delta=text), self.sandbox)
        try:
            result = tool.run(call.arguments, context)
        except QuireError as error:
            result = ToolResult(str(error), True)
        except Exception as error:
            result = ToolResult(f"The tool failed: {type(error).__name__}: {error}"[:2000], True)
        result.seconds = result.seconds or time.monotonic() - started
        note = self.hooks.after(call.name, call.arguments, result)
        if note:
            result.content += f"\n[hook: {note}]"
        return result

    def _trimmed(self, result: ToolResult) -> ToolResult:
        result.content = trim_text(result.content, self.max_result)
        return result

    def _finish(self, item: Event, result: ToolResult) -> None:
        fields = {
            "status": "failed" if result.is_error else "completed",
            "output": result.content,
            "exit_code": result.exit_code,
            "seconds": round(result.seconds, 3),
        }
        self.items.complete(item, **fields, **({"diff": result.diff} if result.diff else {}))


class _ToolThread(threading.Thread):
    """One call in a thread of its own. The thread does not keep the program from ending, so a tool that hangs and takes
    no notice of an interrupt can be left behind."""

    def __init__(self, runner: CallRunner, call: ReadyCall, item: Event, cancelled: threading.Event) -> None:
        super().__init__(name=f"tool {call.name}", daemon=True)
        self.result: ToolResult | None = None
        self.done = threading.Event()  # is_alive is wrong after an interrupt of join
        self._runner, self._call, self._item, self._cancelled = runner, call, item, cancelled

    def skip(self) -> None:
        """Ends a call that has not begun."""
        self.result = ToolResult(INTERRUPTED, True)
        self.done.set()

    def run(self) -> None:
        try:
            self.result = self._runner.call_tool(self._call, self._item, self._cancelled)
        finally:
            self.done.set()


def _wait(jobs: Sequence[_ToolThread], cancelled: threading.Event) -> bool:
    """Starts all and waits for them. Ctrl-C ends the calls; returns whether that happened."""
    deadline: float | None = None
    while not all(job.done.is_set() for job in jobs) and (deadline is None or time.monotonic() < deadline):
        try:
            for job in jobs:
                if job.ident is None and cancelled.is_set():
                    job.skip()
                elif job.ident is None:
                    job.start()
            for job in jobs:
                job.done.wait(0.2)
        except KeyboardInterrupt:
            cancelled.set()
            deadline = deadline or time.monotonic() + _STOP_SECONDS
    return cancelled.is_set()
