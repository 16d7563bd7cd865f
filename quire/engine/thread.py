"""The engine in a thread of its own: messages in through an inbox, deltas out through a callback.

Any thread may submit or cancel; the loop sleeps while it has nothing to do and is woken by the next message. If the
engine itself breaks, every open request is told so and later ones are refused: nothing hangs.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from quire.engine.loop import Engine
from quire.types import Delta, FinishReason, QuireError, Request

Outbox = Callable[[list[Delta]], None]


class EngineThread:
    def __init__(self, engine: Engine, outbox: Outbox):
        self._engine = engine
        self._outbox = outbox
        self._inbox: queue.SimpleQueue[Request | str | None] = queue.SimpleQueue()
        self._failure: QuireError | None = None
        self._open: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        if self._failure is not None:
            raise self._failure
        self._inbox.put(request)

    def cancel(self, request_id: str) -> None:
        self._inbox.put(request_id)

    def close(self) -> None:
        """Stop after the turn under way; what is open then ends as cancelled."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._accept():
                if self._engine.has_work:
                    self._send(self._engine.turn())
            self._end_all(FinishReason.CANCELLED, None)
        except BaseException as error:
            self._failure = QuireError("engine_failed", f"The engine stopped: {type(error).__name__}: {error}.",
                                       "Start it again; QUIRE_DEBUG=1 shows where it failed.")  # fmt: skip
            self._end_all(FinishReason.ERROR, self._failure)
        finally:
            self._failure = self._failure or QuireError("engine_closed", "The engine was closed.")
            self._engine.close()
            while not self._inbox.empty():  # whoever came in at the last moment must not wait for ever
                message = self._inbox.get()
                if isinstance(message, Request):
                    self._refuse(message, self._failure)

    def _accept(self) -> bool:
        """Take in what has arrived, waiting only if there is nothing to do; False: time to stop."""
        block = not self._engine.has_work
        while block or not self._inbox.empty():
            message = self._inbox.get()
            block = False
            if message is None:
                return False
            if isinstance(message, str):
                self._engine.cancel(message)
                continue
            try:
                self._engine.add(message)
                self._open.add(message.id)
            except QuireError as error:
                self._refuse(message, error)
        return True

    def _refuse(self, request: Request, error: QuireError) -> None:
        self._outbox([Delta(request.id, finish_reason=FinishReason.ERROR, error=str(error), error_code=error.code)])

    def _send(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                self._open.discard(delta.request_id)
        if deltas:
            self._outbox(deltas)

    def _end_all(self, reason: FinishReason, error: QuireError | None) -> None:
        what, code = (str(error), error.code) if error else (None, None)
        self._outbox([Delta(i, finish_reason=reason, error=what, error_code=code) for i in sorted(self._open)])
        self._open.clear()
