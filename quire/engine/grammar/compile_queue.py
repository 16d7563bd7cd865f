"""The queue of requests whose grammars are being compiled in other threads, while the engine runs other requests.

The driver passes every new request to the queue and collects those that are ready in each turn. A request whose grammar
is cached does not wait.
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
    """Compiles the grammars of requests. Only the loop's thread uses it, except for `compile_all`."""

    def __init__(
        self,
        make_compiler: Callable[[], GrammarCompiler],
        *,
        deadline: float = DEADLINE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._make_compiler = make_compiler  # called for the first grammar, since most runs have none
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()  # guards the first use by several threads that share an LLM
        self._deadline = deadline
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def warm(self) -> None:
        """Build the compiler and its vocabulary now, so that the first grammar does not delay the loop.

        A model that does not support grammars raises only when a request has one.
        """
        with suppress(QuireError):
            self._ready_compiler().warm()

    def take(self, request: Request) -> bool:
        """Take a new request. True if it waits here for its grammar; False if it has no grammar or a cached one.

        Raises if the grammar is known to be unusable.
        """
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
        """Compile the grammars of requests and wait for them, for a caller that runs the loop. Raises on errors."""
        for request in requests:
            if isinstance(request.grammar, GrammarSpec):
                request.grammar = self._ready_compiler().compile(request.grammar, deadline=self._deadline)

    def ready(self) -> list[tuple[Request, QuireError | None]]:
        """Remove and return the requests that no longer wait, each with the error if its grammar failed."""
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
        """Remove and return a waiting request; None if no request with this id waits."""
        place = self._waiting.pop(request_id, None)
        return None if place is None else place.request

    def wait(self, seconds: float) -> None:
        """Wait until a grammar is ready, for at most `seconds`."""
        wait([place.grammar for place in self._waiting.values()], seconds, FIRST_COMPLETED)

    def _ready_compiler(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                self._compiler = self._make_compiler()
            return self._compiler
