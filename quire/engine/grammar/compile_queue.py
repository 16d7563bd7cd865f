"""Where requests wait for their grammars: compiled in other threads, so that those who run go on meanwhile.

The engine hands every new request to the desk and asks it each turn who is ready. A request whose grammar is known
already does not wait at all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass

from quire.engine.grammar.matcher import DEADLINE_SECONDS, Grammar, GrammarCompiler, too_slow
from quire.types import GrammarSpec, QuireError, Request


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: Request
    grammar: Future[Grammar]
    until: float


class GrammarQueue:
    """One thread's, the loop's; only `compile_all` is for any."""

    def __init__(
        self,
        make_compiler: Callable[[], GrammarCompiler],
        *,
        deadline: float = DEADLINE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._make_compiler = make_compiler  # called when the first grammar comes: most runs never see one
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()  # threads that share an LLM may all come with their first grammar
        self._deadline = deadline
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def warm(self) -> None:
        """Build the compiler and its vocabulary now: the first grammar would hold up the loop for it. A model that can
        have no grammars is told so when one is asked for."""
        with suppress(QuireError):
            self._ready_compiler().warm()

    def take(self, request: Request) -> bool:
        """True: the request stays here for now. False: it may go on, with its grammar if it has one. Raises if the
        grammar is known to be unusable."""
        if not isinstance(request.grammar, GrammarSpec):
            return False
        if request.id in self._waiting:
            raise QuireError("duplicate_id", f"A request with id {request.id!r} is already running.", "Use a fresh id.")
        grammar = self._ready_compiler().submit(request.grammar, deadline=self._deadline)
        if grammar.done():
            request.grammar = grammar.result()
            return False
        self._waiting[request.id] = _Waiting(request, grammar, self._clock() + self._deadline)
        return True

    def compile_all(self, requests: Iterable[Request]) -> None:
        """Compile now and wait for it: for a caller that turns the loop itself. Raises what is wrong with a grammar."""
        for request in requests:
            if isinstance(request.grammar, GrammarSpec):
                request.grammar = self._ready_compiler().compile(request.grammar, deadline=self._deadline)

    def ready(self) -> list[tuple[Request, QuireError | None]]:
        """Who need not wait any longer: with a grammar, or with the reason why there is none."""
        found: list[tuple[Request, QuireError | None]] = []
        now = self._clock()
        for place in list(self._waiting.values()):
            error: QuireError | None = None
            if place.grammar.done():
                raised = place.grammar.exception()
                if raised is None:
                    place.request.grammar = place.grammar.result()
                elif isinstance(raised, QuireError):
                    error = raised
                else:
                    what = f"The grammar could not be compiled ({type(raised).__name__}: {raised})."
                    error = QuireError("grammar_failed", what, "Please report it, with the schema.")
            elif now > place.until:
                error = too_slow(self._deadline)
            else:
                continue
            del self._waiting[place.request.id]
            found.append((place.request, error))
        return found

    def drop(self, request_id: str) -> Request | None:
        """Someone does not want to wait any longer. None: nobody of that name waits here."""
        place = self._waiting.pop(request_id, None)
        return None if place is None else place.request

    def wait(self, seconds: float) -> None:
        """Until someone is ready, at most so long: for a loop that has nothing else to do."""
        wait([place.grammar for place in self._waiting.values()], seconds, FIRST_COMPLETED)

    def _ready_compiler(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                self._compiler = self._make_compiler()
            return self._compiler
