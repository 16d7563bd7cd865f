"""What shall go wrong next, inside a process under test. The gate arms faults through a socket, the wrappers ask.

A fault is armed once and happens once, unless it is a poison: that one follows a request around, known by the seed the
gate gave it, and happens every time. Nothing here is reachable from a server that was not started by the gate.
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
    """The seed that makes a request poisonous."""
    return POISON_BASE + POISONS.index(kind)


def poison_of(seed: int | None) -> str | None:
    place = -1 if seed is None else seed - POISON_BASE
    return POISONS[place] if 0 <= place < len(POISONS) else None


class ArmedFaults:
    """Armed faults of one process. Any thread may arm, the process's own loop takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._armed: Counter[str] = Counter()
        self.happened: Counter[str] = Counter()

    def arm(self, kind: str) -> None:
        with self._lock:
            self._armed[kind] += 1

    def take(self, kind: str) -> bool:
        """Has this been armed? Then it happens now."""
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
        """Take orders at a socket, in a thread; a process that died before left its socket behind."""
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
                if order.get("arm"):  # answered before: it may be the end of this process, and then of the next one too
                    self.arm(str(order["arm"]))


def arm_fault(path: Path, kind: str | None) -> dict[str, int] | None:
    """Arm a fault in the process that listens there; returns what has happened in it so far, None if nobody listens."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(5)
            connection.connect(str(path))
            connection.sendall(json.dumps({"arm": kind}).encode() + b"\n")
            injected: dict[str, int] = json.loads(connection.makefile("rb").readline())
            return injected
    except (OSError, ValueError):
        return None
