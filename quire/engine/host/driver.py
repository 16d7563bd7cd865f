"""The loop around an engine: receive messages from a mailbox, turn the engine, send deltas to the mailbox.

`EngineThread` uses a mailbox of queues, the engine process one of sockets. An error of one request ends that request.
If the engine itself breaks, the mailbox gets the open requests: that of a thread ends them, that of a process leaves
them to the next engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from quire.cache.tiers.seam import TierFault
from quire.engine.grammar.compile_queue import GrammarQueue
from quire.engine.host.wire import MAX_TEXT, IntegrityCheck, IntegrityReport
from quire.engine.loop import SESSION_WAIT_SECONDS, Engine, StepFault
from quire.types import Delta, FinishReason, QuireError, Request, Usage, is_out_of_memory
from quire.types.control import ControlCommand, ControlReply
from quire.types.sessions import SessionCommand, SessionReply

TRANSFER_SECONDS = 0.25  # maximum wait for a transfer between cache tiers, after which deadlines are looked at
GRAMMAR_WAIT_SECONDS = 0.02  # maximum wait for a grammar, during which messages are not received


@dataclass(frozen=True, slots=True)
class Cancel:
    """A request to cancel one request."""

    request_id: str


class Stop:
    """A request to stop after the current turn; open requests end as cancelled."""


class Wake:
    """A transfer between cache tiers has ended."""


Message = Request | Cancel | Stop | Wake | IntegrityCheck | SessionCommand | ControlCommand
Report = StepFault | IntegrityReport | TierFault | SessionReply | ControlReply


class Mailbox(Protocol):
    """The source of messages and the destination of deltas and reports."""

    def receive(self, block: bool) -> Sequence[Message]:
        """Return the messages that have arrived. Waits for one only with `block`, and may return none even then."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait for a message or a call of `wake`, at most so many seconds."""
        ...

    def wake(self) -> None:
        """End a `wait`, now or the next one. Any thread may call it."""
        ...

    def send(self, deltas: list[Delta]) -> None: ...

    def report(self, report: Report) -> None:
        """Send a report for operators."""
        ...

    def abandon(self, open_ids: Sequence[str], failure: QuireError) -> None:
        """Handle the requests that were open when the engine broke."""
        ...


class EngineDriver:
    """Runs an engine on the messages of a mailbox until it is stopped or breaks."""

    def __init__(self, engine: Engine, mailbox: Mailbox, grammars: GrammarQueue | None = None):
        """Without `grammars`, the queue that compiles grammars, requests with a grammar are refused."""
        self._engine = engine
        self._mailbox = mailbox
        self._grammars = grammars
        self._open: set[str] = set()
        self.failure: QuireError | None = None  # the reason for the end of `run`, once it has ended
        engine.on_transfer(mailbox.wake)

    def run(self) -> None:
        """Run until a Stop arrives or the engine breaks; `failure` then holds the reason."""
        try:
            while self._accept():
                self._admit_compiled()
                for tier_fault in self._engine.scheduler.cache.take_faults():
                    self._mailbox.report(tier_fault)
                for reply in self._engine.sessions.poll():
                    self._mailbox.report(reply)
                for control_reply in self._engine.controls.poll():
                    self._mailbox.report(control_reply)
                if self._engine.has_work:
                    self._engine.turn(self._send)
                    for fault in self._engine.take_faults():
                        self._mailbox.report(fault)
                    if not self._engine.has_work:
                        self._engine.poll_transfers()  # starts to write what the last step copied to host memory
                elif self._grammars is not None and len(self._grammars):
                    self._grammars.wait(GRAMMAR_WAIT_SECONDS)
                else:
                    self._engine.run_warm_up()  # warm-up work, while no request waits
                    self._engine.poll_transfers()
            self._cancel_all()
        except BaseException as error:
            self.failure = _failure(error)
            open_ids, self._open = sorted(self._open), set()
            self._mailbox.abandon(open_ids, self.failure)
            if not isinstance(error, Exception):
                raise
        finally:
            self.failure = self.failure or QuireError("engine_closed", "The engine was closed.")
            self._engine.close()
            with suppress(QuireError):
                for message in self._mailbox.receive(block=False):  # requests that arrived last must not wait for ever
                    if isinstance(message, Request):
                        self._mailbox.abandon([message.id], self.failure)

    def _accept(self) -> bool:
        """Handle the messages that have arrived, waiting only if there is no work left. False: stop."""
        if (self._engine.awaits_transfers or self._engine.awaits_session) and not self._num_compiling:
            self._mailbox.wait(SESSION_WAIT_SECONDS if self._engine.awaits_session else TRANSFER_SECONDS)
        has_something = self._engine.has_work or self._num_compiling or self._engine.has_warm_ups
        has_something = has_something or self._engine.awaits_session
        for message in self._mailbox.receive(block=not has_something):
            if isinstance(message, Stop):
                return False
            if isinstance(message, Cancel):
                self._cancel(message.request_id)
            elif isinstance(message, Wake):
                continue
            elif isinstance(message, SessionCommand):
                self._engine.sessions.start(message)
            elif isinstance(message, ControlCommand):
                self._engine.controls.start(message)
            elif isinstance(message, IntegrityCheck):
                self._mailbox.report(check_engine(self._engine, message.number))
            else:
                self._take(message)
        return True

    @property
    def _num_compiling(self) -> int:
        """Number of requests that wait for their grammars."""
        return 0 if self._grammars is None else len(self._grammars)

    def _take(self, request: Request) -> None:
        try:
            if self._grammars is None and request.grammar is not None:
                raise QuireError("no_grammar", "This engine can't enforce a schema, pattern or tool choice.")
            self._open.add(request.id)
            if self._grammars is None or not self._grammars.take(request):
                self._engine.add(request)
        except QuireError as error:
            self._refuse(request, error)
        except Exception as error:  # our own error, but the engine holds nothing of the request yet
            what = f"The request could not be prepared ({type(error).__name__}: {error})."
            self._refuse(request, QuireError("prepare_failed", what, "Other requests were not affected."))

    def _admit_compiled(self) -> None:
        """Queue the requests whose grammars are compiled, and refuse those whose grammars failed."""
        for request, error in self._grammars.ready() if self._grammars is not None else ():
            try:
                if error is not None:
                    raise error
                self._engine.add(request)
            except QuireError as refusal:
                self._refuse(request, refusal)

    def _cancel(self, request_id: str) -> None:
        request = self._grammars.drop(request_id) if self._grammars is not None else None
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

    def _cancel_all(self) -> None:
        ends = [Delta(name, finish_reason=FinishReason.CANCELLED) for name in sorted(self._open)]
        self._open.clear()
        self._mailbox.send(ends)


def _failure(error: BaseException) -> QuireError:
    if isinstance(error, QuireError):
        return error
    code = "out_of_memory" if any(map(is_out_of_memory, (error, error.__cause__ or error))) else "engine_failed"
    what = f"The engine stopped: {type(error).__name__}: {error}."
    return QuireError(code, what, "Start it again; QUIRE_DEBUG=1 shows where it failed.")


def failure_deltas(open_ids: Sequence[str], failure: QuireError) -> list[Delta]:
    """Return deltas that end these requests with the engine's failure."""
    what, code = str(failure), failure.code
    return [Delta(name, finish_reason=FinishReason.ERROR, error=what, error_code=code) for name in open_ids]


def check_engine(engine: Engine, number: int = 0) -> IntegrityReport:
    """Check that every row, page and lease is accounted for. Only between turns."""
    scheduler = engine.scheduler
    problem = None
    try:
        scheduler.check()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    leaked = 0 if scheduler.requests or engine.num_inflight else scheduler.cache.ledger.num_unreachable()
    if leaked and problem is None:
        problem = f"{leaked} units have leaked: neither a request nor the prefix tree holds them."
    problem = None if problem is None else problem[:MAX_TEXT]
    return IntegrityReport(number, problem, len(scheduler.requests), leaked)
