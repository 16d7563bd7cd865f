"""The disk of the KV cache under the chaos gate: full, read-only, slow or gone for a while after a fault was armed."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator

from quire.cache.tiers.folder import BlockStore, StoredFile
from quire.chaos.faults import ArmedFaults
from quire.chaos.kinds import DISKS

NUM_CALLS = 24  # that a fault lasts
SLOW_SECONDS = 0.05
ERRORS = {"cache_full": errno.ENOSPC, "cache_readonly": errno.EROFS, "cache_vanished": errno.ENOTCONN}


class FaultyDisk:
    """Implements `BlockStore`. A write takes an armed fault, which then concerns the next calls."""

    def __init__(self, inner: BlockStore, faults: ArmedFaults):
        self._inner, self._faults = inner, faults
        self._lock = threading.Lock()
        self._kind, self._left = "", 0
        self.is_shared = inner.is_shared

    def scan(self) -> Iterator[StoredFile]:
        return self._inner.scan()

    def read(self, name: str, max_bytes: int) -> bytes | None:
        self._meet(self._next(), "cache_vanished")
        return self._inner.read(name, max_bytes)

    def write(self, name: str, data: bytes) -> None:
        with self._lock:
            found = next((kind for kind in DISKS if not self._left and self._faults.take(kind)), None)
            if found is not None:
                self._kind, self._left = found, NUM_CALLS
        self._meet(self._next(), *ERRORS)
        self._inner.write(name, data)

    def delete(self, name: str) -> None:
        self._meet(self._next(), "cache_readonly", "cache_vanished")
        self._inner.delete(name)

    def _next(self) -> str:
        """Return the fault that the next call meets, if any."""
        with self._lock:
            if not self._left:
                return ""
            self._left -= 1
            return self._kind

    @staticmethod
    def _meet(kind: str, *failing: str) -> None:
        if kind == "cache_slow":
            time.sleep(SLOW_SECONDS)
        elif kind in failing:
            raise OSError(ERRORS[kind], os.strerror(ERRORS[kind]))
