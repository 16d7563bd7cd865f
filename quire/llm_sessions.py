"""`LLM.sessions`: conversations whose cache is kept under a name, across restarts and on other machines.

They need a cache folder: `LLM(model, cache_dir="...")`. The folder is that of one user, so sessions have no owner here.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

from quire.cache.index import CacheIndex
from quire.cache.tiers.session_files import export_session, import_session
from quire.edge import Edge, Prompt
from quire.types import QuireError
from quire.types.sessions import DEFAULT_SECONDS, SessionCommand, SessionInfo

OWNER = ""


class LLMSessions:
    """`run` executes a command on the engine, `cache` returns the engine's index."""

    def __init__(
        self, edge: Edge, run: Callable[[SessionCommand], SessionInfo | None], cache: Callable[[], CacheIndex]
    ):
        self._edge = edge
        self._run = run
        self._cache = cache
        self._numbers = itertools.count(1)

    def save(
        self,
        name: str,
        prompt: Prompt,
        *,
        expires_in: float = DEFAULT_SECONDS,
        salt: bytes = b"",
    ) -> SessionInfo:
        """Keeps what the cache holds of a conversation (messages, text or token ids) under a name, in place of what had
        that name. Returns when it is on disk. Messages are kept with it."""
        messages = json.dumps(list(prompt)) if prompt and isinstance(prompt[0], dict) else ""
        command = SessionCommand(
            next(self._numbers), "save", name, OWNER, self._edge.encode(prompt), salt, expires_in, messages
        )
        return self._one(command)

    def load(self, name: str) -> SessionInfo:
        """Loads a session's cache into host memory, so that its next turn computes its new tokens alone."""
        return self._one(SessionCommand(next(self._numbers), "load", name, OWNER))

    def get(self, name: str) -> SessionInfo:
        return self._one(SessionCommand(next(self._numbers), "get", name, OWNER))

    def delete(self, name: str) -> None:
        """Forgets a session. Its blocks stay in the cache until they are evicted."""
        self._run(SessionCommand(next(self._numbers), "delete", name, OWNER))

    def export(self, name: str, path: str | Path) -> SessionInfo:
        """Writes a session with its cache to a new file, to be imported elsewhere."""
        return export_session(self._folder(), OWNER, name, Path(path))

    def import_file(self, path: str | Path, name: str | None = None) -> SessionInfo:
        """Takes over an exported session of this model, under its own name or another; `load` then loads it."""
        cache = self._cache()
        info = import_session(self._folder(), Path(path), owner=OWNER, name=name, weights=cache.weights)
        cache.stores[0].rescan()
        return info

    def _folder(self) -> Path:
        tiers = self._cache().tiers
        if tiers is None or tiers.sessions is None:
            what = "This engine keeps no sessions, because it has no cache folder."
            raise QuireError("no_cache_folder", what, 'Start it with cache_dir="FOLDER".')
        return tiers.sessions.cache

    def _one(self, command: SessionCommand) -> SessionInfo:
        info = self._run(command)
        assert info is not None, "only a deletion returns none"
        return info
