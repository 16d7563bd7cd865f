"""The adapters of one engine: loads and removes them while it runs, and says which are there.

`AdapterSlots` decides which of them the device holds; the `AdapterHost`, which knows tensors, reads and keeps their
weights. An adapter that is to be removed while requests use it leaves with the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from quire.engine.adapters.slots import AdapterSlots
from quire.files.adapters import AdapterFiles, NamedAdapters, read_adapter
from quire.types import QuireError, Request


class AdapterHost(Protocol):
    """Where the weights of adapters are."""

    def load(self, files: AdapterFiles) -> Any:
        """Read an adapter into host memory, on any thread. Raises for one that does not fit the model."""
        ...

    def forget(self, digest: str) -> None: ...

    def shapes(self) -> Mapping[str, tuple[int, int]]:
        """Return rows and columns of every linear layer that an adapter can change, by name."""
        ...


class NoAdapters:
    """The host of an engine that can't have adapters."""

    def __init__(self, why: str = "This engine takes no adapters."):
        self._why = why

    def load(self, files: AdapterFiles) -> Any:
        raise QuireError("adapters_unsupported", self._why, "Merge the adapter into the weights instead.", "adapter")

    def forget(self, digest: str) -> None:
        pass

    def shapes(self) -> Mapping[str, tuple[int, int]]:
        return {}


class EngineAdapters:
    """Registers adapters. Only the engine's thread calls it, except `read`."""

    def __init__(self, slots: AdapterSlots, host: AdapterHost, requests: Callable[[], Iterable[Request]]):
        """`requests`: returns the open requests."""
        self.slots = slots
        self._requests = requests
        self._host = host
        self._leaving: set[str] = set()  # removed, but still used by requests

    def read(self, files: AdapterFiles) -> None:
        """Read an adapter's weights. May take long; any thread."""
        self._host.load(files)

    def shapes(self) -> Mapping[str, tuple[int, int]]:
        """Return rows and columns of every linear layer that an adapter can change, by name."""
        return self._host.shapes()

    def register(self, digest: str) -> None:
        """Accept requests with an adapter whose weights were read."""
        self.slots.known.add(digest)
        self._leaving.discard(digest)

    def load(self, names: NamedAdapters, name: str, path: str | Path) -> None:
        """Read an adapter, accept requests with it, and give it a name. Only before the engine runs."""
        names.check_free(name)
        files = read_adapter(path)
        self.read(files)
        self.register(files.digest)
        names.put(name, files)

    def remove(self, digest: str) -> int:
        """Remove an adapter, at once or after the last open request that uses it. Returns the number of these."""
        if digest not in self.slots.known:
            return 0
        num_users = self.num_users(digest)
        if num_users or self.slots.is_used(digest):
            self._leaving.add(digest)
        else:
            self._drop(digest)
        return num_users

    def num_users(self, digest: str) -> int:
        """Number of open requests that use the adapter."""
        return sum(request.adapter == digest for request in self._requests())

    def drop_unused(self) -> None:
        """Drop removed adapters whose last request has ended and left its row."""
        if self._leaving:
            used = {request.adapter for request in self._requests()}
            for digest in self._leaving - used:
                if not self.slots.is_used(digest):
                    self._drop(digest)

    def _drop(self, digest: str) -> None:
        self._leaving.discard(digest)
        self.slots.forget(digest)
        self._host.forget(digest)
