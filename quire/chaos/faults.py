"""Faults armed in a process under test. The gate arms them through a socket, and the wrappers take them.

An armed fault happens once. A poison belongs to a request, is recognised by the request's seed, and happens whenever
that request is computed. A server that the gate did not start has no such socket.
"""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

POISON_BASE = 0x0C4A05000000
POISONS = ("raise", "nonfinite", "die", "mask", "prepare", "detokenize")


def poison_seed(kind: str) -> int:
    """Return the seed that marks a request with this poison."""
    return POISON_BASE + POISONS.index(kind)


def poison_of(seed: int | None) -> str | None:
    place = -1 if seed is None else seed - POISON_BASE
    return POISONS[place] if 0 <= place < len(POISONS) else None


class ArmedFaults:
    """The armed faults of one process. Any thread may arm them; the engine's loop takes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._armed: Counter[str] = Counter()
        self.happened: Counter[str] = Counter()

    def arm(self, kind: str) -> None:
        with self._lock:
            self._armed[kind] += 1

    def take(self, kind: str) -> bool:
        """Return whether a fault of this kind is armed, and disarm it: the caller makes it happen."""
        if not self._armed:
            return False
        with self._lock:
            if not self._armed[kind]:
                return False
            self._armed[kind] -= 1
            if not self._armed[kind]:
                del self._armed[kind]
            self.happened[kind] += 1
            return True

    def listen(self, path: Path) -> None:
        """Receive orders at a socket, in a thread. A socket that a dead process left there is replaced."""
        with suppress(FileNotFoundError):
            path.unlink()
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.bind(str(path))
        server.listen(16)
        threading.Thread(target=self._serve, args=(server,), name="chaos-orders", daemon=True).start()

    def _serve(self, server: socket.socket) -> None:
        while True:
            connection, _ = server.accept()
            with connection, suppress(OSError, ValueError):
                connection.settimeout(5)
                order = json.loads(connection.makefile("rb").readline())
                connection.sendall(json.dumps(dict(self.happened)).encode() + b"\n")
                if order.get(
                    "arm"
                ):  # after the reply: the fault may end this process, and a repeated order the next one
                    self.arm(str(order["arm"]))


def arm_fault(path: Path, kind: str | None) -> dict[str, int] | None:
    """Arm a fault, if `kind` is given, in the process that listens at `path`; return the counts of faults that
    happened in it, None if no process listens."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(5)
            connection.connect(str(path))
            connection.sendall(json.dumps({"arm": kind}).encode() + b"\n")
            injected: dict[str, int] = json.loads(connection.makefile("rb").readline())
            return injected
    except (OSError, ValueError):
        return None
