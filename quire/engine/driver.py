"""The one loop around an engine: take in messages, turn, send the news. A mailbox says where both come from and go to.

`EngineThread` drives it with a queue inside one process, `process` with a socket. If the engine itself breaks, every
open request is told so and later ones are refused: nothing hangs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.engine.grammar_desk import GrammarDesk
from quire.engine.loop import Engine
from quire.engine.workers import DeviceLost
from quire.types import Delta, FinishReason, QuireError, Request, Usage

DESK_SECONDS = 0.02  # messages wait at most so long while nothing but a grammar is being worked on


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str


class Stop:
    """Stop after the turn under way; what is open then ends as cancelled."""


Message = Request | Cancel | Stop


class Mailbox(Protocol):
    def receive(self, block: bool) -> Sequence[Message]:
        """What has arrived. Only with `block` it may wait, and even then it may come back with nothing."""
        ...

    def send(self, deltas: list[Delta]) -> None: ...


class EngineDriver:
    def __init__(self, engine: Engine, mailbox: Mailbox, desk: GrammarDesk | None = None):
        """`desk`: where requests wait for their grammars; without one the engine takes requests without grammar."""
        self._engine = engine
        self._mailbox = mailbox
        self._desk = desk
        self._open: set[str] = set()
        self.failure: QuireError | None = None  # why it stopped, once it has

    def run(self) -> None:
        """Until a Stop comes or the engine breaks; afterwards `failure` says why."""
        try:
            while self._accept():
                self._admit_compiled()
                if self._engine.has_work:
                    self._send(self._engine.turn())
                elif self._desk is not None and len(self._desk):
                    self._desk.wait(DESK_SECONDS)
                else:
                    self._engine.do_chore()  # a moment with nobody to wait for it
            self._end_all(FinishReason.CANCELLED, None)
        except BaseException as error:
            self.failure = error if isinstance(error, DeviceLost) else _stopped_by(error)
            self._end_all(FinishReason.ERROR, self.failure)
            if not isinstance(error, Exception):
                raise
        finally:
            self.failure = self.failure or QuireError("engine_closed", "The engine was closed.")
            self._engine.close()
            for message in self._mailbox.receive(block=False):  # who came at the last moment must not wait for ever
                if isinstance(message, Request):
                    self._refuse(message, self.failure)

    def _accept(self) -> bool:
        """Take in what has arrived, waiting only if there is nothing to do, not even ahead; False: time to stop."""
        has_something = self._engine.has_work or self._num_compiling or self._engine.has_chores
        for message in self._mailbox.receive(block=not has_something):
            if isinstance(message, Stop):
                return False
            if isinstance(message, Cancel):
                self._cancel(message.request_id)
            else:
                self._take(message)
        return True

    @property
    def _num_compiling(self) -> int:
        """Requests that wait for their grammars."""
        return 0 if self._desk is None else len(self._desk)

    def _take(self, request: Request) -> None:
        try:
            if self._desk is None and request.grammar is not None:
                raise QuireError("no_grammar", "This engine can't enforce a schema, pattern or tool choice.")
            self._open.add(request.id)
            if self._desk is None or not self._desk.take(request):
                self._engine.add(request)
        except QuireError as error:
            self._refuse(request, error)

    def _admit_compiled(self) -> None:
        """Whoever waited for a grammar and has it now, or learns why there is none."""
        for request, error in self._desk.ready() if self._desk is not None else ():
            try:
                if error is not None:
                    raise error
                self._engine.add(request)
            except QuireError as refusal:
                self._refuse(request, refusal)

    def _cancel(self, request_id: str) -> None:
        request = self._desk.drop(request_id) if self._desk is not None else None
        if request is None:
            self._engine.cancel(request_id)
        else:
            usage = Usage(request.prompt_len)
            self._send([Delta(request_id, finish_reason=FinishReason.CANCELLED, usage=usage)])

    def _refuse(self, request: Request, error: QuireError) -> None:
        self._send([Delta(request.id, finish_reason=FinishReason.ERROR, error=str(error), error_code=error.code)])

    def _send(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                self._open.discard(delta.request_id)
        if deltas:
            self._mailbox.send(deltas)

    def _end_all(self, reason: FinishReason, error: QuireError | None) -> None:
        what, code = (str(error), error.code) if error else (None, None)
        ends = [Delta(i, finish_reason=reason, error=what, error_code=code) for i in sorted(self._open)]
        self._open.clear()
        self._mailbox.send(ends)


def _stopped_by(error: BaseException) -> QuireError:
    what = f"The engine stopped: {type(error).__name__}: {error}."
    return QuireError("engine_failed", what, "Start it again; QUIRE_DEBUG=1 shows where it failed.")
