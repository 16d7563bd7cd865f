"""The engine in its own thread: messages arrive through a queue, deltas leave through a callback.

Any thread may submit or cancel. The loop sleeps while it has no work, until the next message. `EngineDriver` handles
the messages.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from quire.engine.grammar.compile_queue import GrammarQueue
from quire.engine.host.driver import Cancel, EngineDriver, Message, Report, Stop, Wake, failure_deltas
from quire.engine.loop import Engine
from quire.types import Delta, QuireError, Request

Outbox = Callable[[list[Delta]], None]


class EngineThread:
    """An engine that runs in its own daemon thread."""

    def __init__(self, engine: Engine, outbox: Outbox, grammars: GrammarQueue | None = None):
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._driver = EngineDriver(engine, _QueueMailbox(self._inbox, outbox), grammars)
        self._thread = threading.Thread(target=self._driver.run, name="quire-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        if self._driver.failure is not None:
            raise self._driver.failure
        self._inbox.put(request)

    def cancel(self, request_id: str) -> None:
        self._inbox.put(Cancel(request_id))

    def close(self) -> None:
        """Stop the loop after the current turn; open requests end as cancelled."""
        self._inbox.put(Stop())
        self._thread.join()


class _QueueMailbox:
    def __init__(self, inbox: queue.SimpleQueue[Message], outbox: Outbox):
        self._inbox = inbox
        self.send = outbox

        self._early: list[Message] = []  # received by `wait`

    def receive(self, block: bool) -> list[Message]:
        messages, self._early = self._early, []
        if block and not messages:
            messages.append(self._inbox.get())
        while not self._inbox.empty():
            messages.append(self._inbox.get())
        return [message for message in messages if not isinstance(message, Wake)]

    def wait(self, seconds: float) -> None:
        with suppress(queue.Empty):
            self._early.append(self._inbox.get(timeout=seconds))

    def wake(self) -> None:
        self._inbox.put(Wake())

    def report(self, report: Report) -> None:
        """Does nothing: the trace records faults, and a thread has no operator."""

    def abandon(self, open_ids: Sequence[str], failure: QuireError) -> None:
        self.send(failure_deltas(open_ids, failure))
