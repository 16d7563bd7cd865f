"""The bytes of units in host memory, in the layout that blocks have in stores. Implements the cache's `HostUnits`.

Threads of a store read and write units that the cache has set aside for them, while steps go on with others.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from quire.runtime.store import CacheStore
from quire.types import CacheSpec


class PartRange(Protocol):
    """The layers and heads of a part; both ends exclusive."""

    @property
    def layers(self) -> tuple[int, int]: ...

    @property
    def heads(self) -> tuple[int, int]: ...


class StoreHostUnits:
    """Reads and writes the host memory of one `CacheStore`."""

    def __init__(self, store: CacheStore, link_tokens: int):
        self._store = store
        self._link_tokens = link_tokens
        self._bytes = [_by_head(spec, store.host_bytes(group)) for group, spec in enumerate(store.specs)]

    def read(self, group: int, unit: int, first_token: int, part: PartRange) -> bytes:
        """Returns the bytes of a part: [layers, planes, tokens, heads, ...], or [layers, heads, ...] of a state."""
        return self._range(group, unit, first_token, part).tobytes()

    def write(self, group: int, unit: int, first_token: int, part: PartRange, body: memoryview) -> None:
        target = self._range(group, unit, first_token, part)
        target[...] = np.frombuffer(body, np.uint8).reshape(target.shape)

    def seal(self, group: int, unit: int) -> None:
        """Takes the checksum of a unit that was written as a whole."""
        self._store.note_checksum(group, unit)

    def is_intact(self, group: int, unit: int) -> bool:
        return self._store.is_intact(group, unit)

    def has_arrived(self, group: int, unit: int) -> bool:
        return self._store.has_arrived(group, unit)

    def _range(self, group: int, unit: int, first_token: int, part: PartRange) -> np.ndarray:
        data, layers, heads = self._bytes[group], slice(*part.layers), slice(*part.heads)
        if self._store.specs[group].kind == "state":
            return data[layers, unit, heads]
        return data[layers, :, unit, first_token : first_token + self._link_tokens, heads]


def _by_head(spec: CacheSpec, data: np.ndarray) -> np.ndarray:
    """Returns a view of a group's units: [layers, planes, units, page_tokens, heads, bytes], or [layers, units, heads,
    bytes] of a state."""
    lead = data.shape[: 4 if spec.kind == "paged" else 2]
    return data.reshape(*lead, spec.shape[0], -1)
