"""Starts the engine process, watches it, and starts it again when it is lost, within limits.

It runs in the HTTP process. An engine is lost when its process ends, when no step completes for a set time, or when it
uses more memory than it may. The next engine resumes the client's live requests from the tokens that were delivered.
Every transition between states is logged, counted and kept for `/admin/state`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from quire.client.blame import implicates_requests
from quire.client.engine_client import EngineClient
from quire.client.error_queue import ErrorQueue
from quire.client.link import EngineLink
from quire.config import Config
from quire.engine.host import wire
from quire.engine.states import PROCESS_TRANSITIONS, Move, ProcessState, StateMachine
from quire.files.adapters import NamedAdapters, is_unchanged
from quire.machine import num_memory_kills
from quire.types import QuireError
from quire.types.control import ControlAction, ControlCommand, ControlReply
from quire.types.sessions import SessionAction, SessionCommand, SessionInfo, SessionReply

WATCH_SECONDS = 0.25
FIRST_WAIT_SECONDS = 0.1
LONGEST_WAIT_SECONDS = 10.0
CHECK_SECONDS = 30.0
SESSION_SECONDS = 180.0
CONTROL_SECONDS = 1800.0  # to load weights, which may be large
KEPT_RECOVERIES = 1000
LEVELS = {"gave_up": "error", "lost": "warning", "died_again": "warning", "started": "debug", "stopped": "debug"}
# Errors of settings from which no engine can be built.
UNUSABLE_SETTINGS = frozenset({"invalid_parameter", "unsupported_model"})
SHRINK_FACTOR = 0.75  # share of the pages that the next engine gets after one ran out of memory
MIN_PAGES_SHARE = 0.5  # minimum share of the first engine's pages; with fewer, pages are not the reason

StartLink = Callable[[Mapping[str, Any]], Any]  # settings -> an awaitable EngineLink


@dataclass(frozen=True, slots=True)
class SupervisorLimits:
    """Limits on restarts of the engine, and when an engine counts as hung or too large."""

    max_restarts: int
    window: float  # seconds over which restarts are counted
    hang_timeout: float
    max_memory: int | None  # bytes the engine process may hold
    on_memory: str  # change of the next engine after one ran out of memory: same, shrink, precision

    @classmethod
    def of(cls, config: Config) -> SupervisorLimits:
        server = config.server
        return cls(
            server.max_restarts, server.restart_window, server.hang_timeout, server.engine_memory, server.out_of_memory
        )


class Supervisor:
    """Keeps one engine process running behind a client."""

    def __init__(
        self,
        client: EngineClient,
        start_link: StartLink,
        settings: Mapping[str, Any],
        limits: SupervisorLimits,
        *,
        log: Callable[..., None] = lambda level, event, **fields: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.client = client
        self.errors = ErrorQueue()
        self.states = StateMachine(ProcessState.STARTING, PROCESS_TRANSITIONS, on_move=self._log_move, clock=clock)
        self.cause: QuireError | None = None  # reason of the last loss
        self.recovery_seconds: deque[float] = deque(maxlen=KEPT_RECOVERIES)  # from the loss to the next ready engine
        self.num_restarts = 0
        self.peak_memory = 0
        self._start_link = start_link
        # The settings of the current engine, and those before the last reduction of its memory.
        self._settings = self._previous_settings = dict(settings)
        self._first_pages = 0
        self._limits = limits
        self._log = log
        self._clock = clock
        self._restarts: deque[float] = deque()
        self._link: EngineLink | None = None
        self._task: asyncio.Task[None] | None = None
        self._checks: dict[int, asyncio.Future[wire.IntegrityReport]] = {}
        self._controls: dict[int, asyncio.Future[ControlReply]] = {}
        self._sessions: dict[int, asyncio.Future[SessionReply]] = {}
        self._numbers = itertools.count(1)
        self._memory_kills = num_memory_kills()
        self.adapters = NamedAdapters()  # those that the next engine must have, too
        client.on_error = lambda request_id, code, what: self.errors.put("request", code, what, [request_id])

    # -- run ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the first engine. Raises the engine's own error if it fails, so that the server ends with it."""
        try:
            self._attach(await self._start_link(self._settings))
            self._first_pages = num_pages(self.client.ready)
        except BaseException as error:
            self.states.move("gave_up", str(error))
            raise
        self.states.move("started")
        self._task = asyncio.create_task(self._run())

    async def stop(self, *, at_once: bool = False) -> None:
        if self.states.state is ProcessState.STOPPED:
            return
        self.states.move("stopped")
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self.client.fail(QuireError("engine_closed", "The server is shutting down."))
        if self._link is not None:
            await (self._link.end() if at_once else self._link.stop())

    async def _run(self) -> None:
        """Watch engines and start the next one after each loss, until the restart limit is reached."""
        while self._link is not None:
            link, cause = self._link, await self._watch_until_exit(self._link)
            lost_at = self._clock()
            self._link = None
            exit_code, is_stopped = link.exit_code, link.is_stopped()  # read before `end` kills the process
            with suppress(Exception):
                await link.end()  # kills a hung engine, so that its flight record is final
            cause = self._record_exit(link, cause, exit_code, is_stopped)
            while self._link is None:
                if not self._may_restart():
                    self._give_up(cause)
                    return
                await asyncio.sleep(self._wait_seconds())
                self.states.move("retry")
                self.num_restarts += 1
                try:
                    settings = await self._with_adapters(self._next_settings(cause))
                    self._attach(await self._start_link(settings))
                except QuireError as error:
                    cause = error
                    self.errors.put("engine", error.code, str(error))
                    self.states.move("died_again", str(error))
                except Exception as error:
                    cause = QuireError("engine_lost", f"The engine can't be started: {type(error).__name__}: {error}.")
                    self.errors.put("engine", cause.code, str(cause))
                    self.states.move("died_again", str(cause))
            self.recovery_seconds.append(self._clock() - lost_at)
            self.states.move("recovered")

    async def _watch_until_exit(self, link: EngineLink) -> QuireError:
        """Return the reason when this engine is lost."""
        tasks = [asyncio.create_task(self._read(link)), asyncio.create_task(self._watch(link))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        except QuireError as error:
            return error
        except Exception as error:  # a bug here: the client is intact, and the next engine resumes
            return QuireError(
                "engine_lost", f"A message of the engine can't be handled: {type(error).__name__}: {error}."
            )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # -- watching -------------------------------------------------------------------------------------------------

    async def _read(self, link: EngineLink) -> QuireError:
        while True:
            try:
                message = await link.receive()
            except QuireError as error:
                return error
            if isinstance(message, wire.Deltas | wire.Beat):
                self.client.take(message)
            elif isinstance(message, wire.Fault):
                kind = "step" if message.kind.startswith("step_") else "message"
                self.errors.put(kind, message.kind, message.what, message.ids)
                self._log("warning", "engine fault", kind=message.kind, what=message.what, requests=len(message.ids))
            elif isinstance(message, wire.IntegrityReport):
                answer = self._checks.pop(message.number, None)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            elif isinstance(message, ControlReply):
                control = self._controls.pop(message.number, None)
                if control is not None and not control.done():
                    control.set_result(message)
            elif isinstance(message, SessionReply):
                waiting = self._sessions.pop(message.number, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)

    async def _watch(self, link: EngineLink) -> QuireError:
        is_late = False
        while True:
            await asyncio.sleep(min(WATCH_SECONDS, self._limits.hang_timeout / 4))
            self.client.expire()
            age = max(self.client.beat_age(), self.client.progress_age())
            # If this process was suspended, messages of the engine are unread; they have one interval to be read.
            was_late, is_late = is_late, age > self._limits.hang_timeout
            if is_late and was_late:
                what = f"The engine has made no progress for {age:.1f} s, limit {self._limits.hang_timeout:g} s."
                return QuireError("engine_hung", what)
            memory = link.memory()
            if memory is not None:
                self.peak_memory = max(self.peak_memory, memory)
                if self._limits.max_memory is not None and memory > self._limits.max_memory:
                    what = f"The engine uses {memory} bytes, more than its limit of {self._limits.max_memory} bytes."
                    return QuireError("out_of_memory", what)

    async def check(self) -> wire.IntegrityReport:
        """Let the engine check that all its units and rows are accounted for, and return its answer."""
        if self._link is None:
            raise QuireError(
                "engine_lost", "The engine is being replaced, so it can't be checked.", "Try again in a moment."
            )
        number = next(self._numbers)
        answer: asyncio.Future[wire.IntegrityReport] = asyncio.get_running_loop().create_future()
        self._checks[number] = answer
        self._link.send(wire.IntegrityCheck(number))
        try:
            checked = await asyncio.wait_for(answer, CHECK_SECONDS)
        except TimeoutError:
            raise QuireError(
                "engine_hung", f"The engine did not answer the check within {CHECK_SECONDS:.0f} s."
            ) from None
        finally:
            self._checks.pop(number, None)
        if checked.problem is not None:
            self.errors.put("check", "check_failed", checked.problem)
        return checked

    async def session(self, action: SessionAction, name: str, owner: str, **fields: Any) -> SessionInfo | None:
        """Let the engine save, load, show or delete a session; return it. Raises the engine's error."""
        if self._link is None:
            raise QuireError("engine_lost", "The engine is being replaced.", "Try again in a moment.")
        number = next(self._numbers)
        answer: asyncio.Future[SessionReply] = asyncio.get_running_loop().create_future()
        self._sessions[number] = answer
        self._link.send(SessionCommand(number, action, name, owner, **fields))
        try:
            return (await asyncio.wait_for(answer, SESSION_SECONDS)).result()
        except TimeoutError:
            what = f"The engine did not answer within {SESSION_SECONDS:.0f} s."
            raise QuireError("engine_hung", what, "Try again later.") from None
        finally:
            self._sessions.pop(number, None)

    async def control(self, action: ControlAction, **fields: Any) -> dict[str, Any]:
        """Let the engine carry out a command; return its reply. Raises the engine's error."""
        if self._link is None:
            raise QuireError("engine_lost", "The engine is being replaced.", "Try again in a moment.")
        number = next(self._numbers)
        answer: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._controls[number] = answer
        self._link.send(ControlCommand(number, action, fields))
        try:
            return (await asyncio.wait_for(answer, CONTROL_SECONDS)).result()
        except TimeoutError:
            what = f"The engine did not answer within {CONTROL_SECONDS:.0f} s."
            raise QuireError("engine_hung", what, "Try again later.") from None
        finally:
            self._controls.pop(number, None)

    def set_for_next(self, settings: Mapping[str, Any]) -> None:
        """Change the settings that later engines start with."""
        self._settings = {**self._settings, **settings}
        self._previous_settings = {**self._previous_settings, **settings}

    # -- after a loss ---------------------------------------------------------------------------------------------

    def _attach(self, link: EngineLink) -> None:
        self._link = link
        self.client.attach(link)

    def _record_exit(self, link: EngineLink, cause: QuireError, exit_code: int | None, is_stopped: bool) -> QuireError:
        """Record the reason of the loss, which the exit code may refine, and detach the engine from the client."""
        kills = num_memory_kills()
        if exit_code == -9 and kills > self._memory_kills:
            cause = QuireError("out_of_memory", "The system killed the engine process because memory ran out.")
        self._memory_kills = kills
        self.cause = cause
        self.states.move("lost", str(cause))
        self.errors.put("engine", cause.code, str(cause))
        for number in list(self._controls):
            self._controls.pop(number).set_exception(
                QuireError("engine_lost", "The engine was lost before it answered.", "Try again in a moment.")
            )
        for number in list(self._sessions):
            self._sessions.pop(number).set_exception(
                QuireError("engine_lost", "The engine was lost before it answered.", "Try again in a moment.")
            )
        for number in list(self._checks):
            self._checks.pop(number).set_exception(
                QuireError("engine_lost", "The engine was lost before it answered the check.")
            )
        suspects = link.in_flight_at_exit if implicates_requests(cause.code, exit_code, is_stopped) else set()
        quarantined = self.client.detach(suspects)
        if quarantined:
            self._log("error", "quarantined", ids=",".join(quarantined))
        return cause

    async def _with_adapters(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the settings with the adapters that are loaded now. One whose files have changed is left out: its
        requests must not go on with other weights."""
        named = self.adapters.needed(live.request.adapter for live in self.client.live.values())
        changed = await asyncio.to_thread(lambda: [name for name, files in named.items() if not is_unchanged(files)])
        for name in changed:
            what = f"The adapter {name!r} has changed on disk, and is not loaded again."
            self.errors.put("engine", "bad_adapter", what)
        kept = ",".join(f"{name}={files.path}" for name, files in named.items() if name not in changed)
        others = {name: value for name, value in settings.items() if name != "adapter"}
        return {**others, "adapter": kept} if kept else others

    def _may_restart(self) -> bool:
        now = self._clock()
        while self._restarts and self._restarts[0] < now - self._limits.window:
            self._restarts.popleft()
        if len(self._restarts) >= self._limits.max_restarts:
            return False
        self._restarts.append(now)
        return True

    def _wait_seconds(self) -> float:
        """Return the delay of the next restart: none for the first one, then doubling."""
        again = len(self._restarts) - 2
        return 0.0 if again < 0 else min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2**again)

    def _give_up(self, cause: QuireError) -> None:
        self.cause = QuireError(
            "engine_lost",
            f"The engine was lost {len(self._restarts) + 1} times within {self._limits.window:.0f} s, the last time "
            f"because: {cause}",
            "It is not started again; restart the server.",
        )
        self.errors.put("engine", "gave_up", str(self.cause))
        self.states.move("gave_up", str(cause))
        self.client.fail(self.cause)

    def _next_settings(self, cause: QuireError) -> dict[str, Any]:
        """Return the settings of the next engine: reduced if the last one ran out of memory, otherwise the same."""
        if cause.code == "out_of_memory":
            self._previous_settings = self._settings
            ready, fewest = self.client.ready, int(self._first_pages * MIN_PAGES_SHARE)
            fewest = max(fewest, num_pages_for(self.client.longest, ready))  # every live request still fits
            self._settings = with_less_memory(self._settings, self._limits.on_memory, ready, fewest)
            changed = {
                name: value for name, value in self._settings.items() if self._previous_settings.get(name) != value
            }
            event = "less memory for the next engine" if changed else "the next engine gets as much memory as the last"
            self._log("warning", event, **changed)
        elif cause.code in UNUSABLE_SETTINGS:  # the reduced settings were too small or not valid
            self._settings = self._previous_settings
        return self._settings

    def _log_move(self, move: Move) -> None:
        level = LEVELS.get(move.name, "info")
        self._log(level, "engine state", transition=move.name, now=move.target, why=move.why or None)


def with_less_memory(settings: Mapping[str, Any], how: str, ready: wire.EngineReady, fewest: int = 2) -> dict[str, Any]:
    """Return settings that need less memory: a lower precision, or `SHRINK_FACTOR` of the pages, at least `fewest`."""
    if how == "precision" and ready.lower:
        return {**settings, **ready.lower}
    pages = int(settings.get("num_pages") or num_pages(ready))
    fewer = max(fewest, int(pages * SHRINK_FACTOR))
    return {**settings, "num_pages": fewer} if how != "same" and fewer < pages else dict(settings)


def num_pages(ready: wire.EngineReady) -> int:
    """Return the pages of the engine's largest pool; 0: it has no paged group."""
    return max((group["units"] for group in _paged(ready)), default=0)


def num_pages_for(num_tokens: int, ready: wire.EngineReady) -> int:
    """Return the pages a pool needs for a request of `num_tokens` tokens, with two to spare."""
    return 2 + max((-(-num_tokens // group["page_tokens"]) for group in _paged(ready)), default=0)


def _paged(ready: wire.EngineReady) -> list[dict[str, Any]]:
    return [group for group in ready.memory.get("groups", ()) if group["kind"] == "paged"]


def link_starter(command: Sequence[str], start_timeout: float) -> StartLink:
    numbers = itertools.count(1)

    async def start(settings: Mapping[str, Any]) -> EngineLink:
        return await EngineLink.start(command, settings, start_timeout, next(numbers))

    return start
