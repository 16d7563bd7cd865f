"""A rank on another machine, as its engine sees it: the connection that its node agent has given to it."""

from __future__ import annotations

import contextlib
import select
import socket

from quire.parallel.socket_pipes import connect, greet
from quire.parallel.topology import GroupNode
from quire.types import QuireError

CONNECT_SECONDS = 5.0


class RemoteProcess:
    """What `subprocess.Popen` is for a rank of this machine, as far as an engine needs it."""

    pid = -1  # of no process of this machine

    def __init__(self, raw: socket.socket):
        self._raw = raw
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns -1 once the other end has closed."""
        if self.returncode is None:
            try:
                readable = bool(select.select([self._raw], [], [], 0)[0])
                if readable and not self._raw.recv(1, socket.MSG_PEEK):
                    self.returncode = -1
            except (OSError, ValueError):
                self.returncode = -1
        return self.returncode

    def kill(self) -> None:
        """Ends the rank: it exits when its connection does."""
        with contextlib.suppress(OSError):
            self._raw.shutdown(socket.SHUT_RDWR)
        self.returncode = -1

    def wait(self, timeout: float | None = None) -> int:
        self.kill()
        return -1


def connect_rank(node: GroupNode, secret: bytes) -> socket.socket:
    """Returns the connection to a new rank on a node. Raises an error in one line if the node does not answer."""
    place = f"Node {node.rank} at {node.address}:{node.port}"
    try:
        raw = connect(node.control, CONNECT_SECONDS)
        knows = greet(raw, secret, connects=True)
    except OSError as error:
        hint = f"Start `quire node --node-rank {node.rank}` there, or correct the topology."
        raise QuireError("node_unreachable", f"{place} does not answer: {error}.", hint) from None
    if not knows:
        raise QuireError("node_unreachable", f"{place} has another secret.", "Copy the secret file to all nodes.")
    raw.settimeout(None)
    return raw
