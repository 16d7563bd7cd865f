"""Sessions of one engine: saves, loads and deletes the cache of conversations by name.

Each command is a generator that the engine's thread advances between turns, until it returns its reply. Files are read
and written by a thread of their own, so no step waits for a disk. A session's cache is kept longest on every tier until
the session expires or is deleted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quire.cache.index import CacheIndex
from quire.cache.prefixes import PrefixLoad, PrefixPin, PrefixStore, probe, ready_tokens, stored_prefix
from quire.cache.tiers.sessions import SessionFolder, StoredSession
from quire.types import QuireError
from quire.types.sessions import (
    MAX_SECONDS,
    SessionCommand,
    SessionInfo,
    SessionReply,
    check_session_id,
    no_such_session,
)

T = TypeVar("T")
Steps = Generator[None, None, T]
POLL_SECONDS = 0.05  # between two looks at a move, since each looks at every block
MOVE_SECONDS = 120.0  # after which a session is saved as far as its blocks were written


class Sessions:
    """`cache` returns the engine's index, which another one replaces after a fault. Only the engine's thread calls it,
    but for `on_done`."""

    def __init__(self, cache: Callable[[], CacheIndex], *, clock: Callable[[], float] = time.time):
        self._cache = cache
        self._clock = clock
        self._open: dict[int, Steps[SessionInfo | None]] = {}
        self._pins: dict[tuple[str, str], tuple[float, PrefixPin]] = {}
        self._numbers = itertools.count(1)
        self._thread: ThreadPoolExecutor | None = None
        self._next_poll = 0.0
        self.on_done: Callable[[], None] = lambda: None  # called by the thread when it has read or written a file

    @property
    def is_open(self) -> bool:
        """Whether a command is under way."""
        return bool(self._open)

    def start(self, command: SessionCommand) -> None:
        self._open[command.number] = self._run(command)

    def poll(self) -> list[SessionReply]:
        """Go on with all commands, and return the replies of those that have ended."""
        replies: list[SessionReply] = []
        now = time.monotonic()
        if not self._open or now < self._next_poll:
            return replies
        for number, steps in list(self._open.items()):
            try:
                next(steps)
                continue
            except StopIteration as end:
                replies.append(SessionReply(number, end.value))
            except QuireError as error:
                replies.append(SessionReply(number, None, error.code, error.what, error.hint))
            except OSError as error:
                what = f"The session's file can't be used: {error.strerror or error}."
                replies.append(SessionReply(number, None, "store_failed", what, "Look at the cache folder's disk."))
            del self._open[number]
        self._next_poll = now + POLL_SECONDS if self._open else 0.0
        return replies

    def close(self) -> None:
        self._open.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    # -- commands -------------------------------------------------------------------------------------------------

    def _run(self, command: SessionCommand) -> Steps[SessionInfo | None]:
        check_session_id(command.id)
        self._drop_expired()
        folder = self._folder()
        if command.action == "save":
            return (yield from self._save(command, folder))
        session = yield from self._aside(lambda: folder.get(command.owner, command.id))
        if session is not None and session.expires_at < self._clock():
            yield from self._aside(lambda: folder.delete(command.owner, command.id))
            session = None
        if session is None:
            raise no_such_session(command.id)
        if command.action == "get":
            return session.info()
        if command.action == "load":
            return (yield from self._load(session))
        yield from self._aside(lambda: folder.delete(command.owner, command.id))
        self._unpin((command.owner, command.id))
        return None

    def _save(self, command: SessionCommand, folder: SessionFolder) -> Steps[SessionInfo]:
        if not command.tokens:
            raise QuireError("empty_prompt", "A session needs a conversation of at least one token.")
        if not 0 < command.seconds <= MAX_SECONDS:
            what = f"A session can't expire after {command.seconds:g} s."
            raise QuireError("invalid_parameter", what, f"Choose more than 0 and at most {MAX_SECONDS:g} s.")
        index = self._cache()
        request = probe(index, f"session-{next(self._numbers)}", command.tokens, command.salt)
        move, give_up_at = PrefixStore(request), time.monotonic() + MOVE_SECONDS
        while self._cache() is index and not move.poll(index) and time.monotonic() < give_up_at:
            yield
        index = self._cache()
        length, blocks = stored_prefix(index, request)
        if not length:
            what = "Nothing of this conversation is in the cache, or nothing of it could be written."
            raise QuireError("nothing_cached", what, "Let the model answer it first, then save it.")
        found = [index.stores[0].files_of(block) for block in blocks]
        now = self._clock()
        session = StoredSession(
            command.id,
            command.owner,
            index.weights,
            command.salt,
            list(command.tokens),
            length,
            [name for names, _ in found for name in names],
            sum(num_bytes for _, num_bytes in found),
            now,
            now + command.seconds,
            command.messages,
        )
        yield from self._aside(lambda: folder.put(session))
        self._pin(session, PrefixPin.hold(index, request, blocks))
        return session.info(ready_tokens(index, request))

    def _load(self, session: StoredSession) -> Steps[SessionInfo]:
        index = self._cache()
        if session.weights != index.weights:
            what = f"The session {session.id!r} is of another model, or of the same with other settings."
            raise QuireError("session_of_other_model", what, "Start that model with the settings of then.")
        request = probe(index, f"session-{next(self._numbers)}", session.tokens, session.salt)
        move = PrefixLoad(request)
        while self._cache() is index and not move.poll(index):
            yield
        index = self._cache()
        self._pin(session, PrefixPin.hold(index, request, stored_prefix(index, request)[1]))
        return session.info(ready_tokens(index, request))

    def _folder(self) -> SessionFolder:
        tiers = self._cache().tiers
        if tiers is None or tiers.sessions is None:
            what = "This engine keeps no sessions, because it has no cache folder."
            raise QuireError("no_cache_folder", what, "Start it with --cache-dir FOLDER.")
        return tiers.sessions

    def _aside(self, work: Callable[[], T]) -> Steps[T]:
        """Run `work` on the thread for files."""
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="quire-sessions")
        result = self._thread.submit(work)
        result.add_done_callback(lambda _: self.on_done())
        while not result.done():
            yield
        return result.result()

    def adopt(self) -> None:
        """Hold the files of all sessions that are in the folder. Called once, before the first step."""
        index = self._cache()
        if index.tiers is None or index.tiers.sessions is None:
            return
        for _, session in index.tiers.sessions.all():
            if session is not None and session.expires_at > self._clock():
                self._pin(session, PrefixPin.of_files(index, session.files))

    # -- pins -----------------------------------------------------------------------------------------------------

    def _pin(self, session: StoredSession, pin: PrefixPin) -> None:
        name = (session.owner, session.id)
        self._unpin(name)
        self._pins[name] = (session.expires_at, pin)

    def _unpin(self, name: tuple[str, str]) -> None:
        if name in self._pins:
            self._pins.pop(name)[1].release()

    def _drop_expired(self) -> None:
        now = self._clock()
        for name in [name for name, (until, _) in self._pins.items() if until < now]:
            self._unpin(name)
