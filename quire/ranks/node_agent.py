"""The node agent: starts ranks on this machine for an engine on another one. `quire node` runs it.

The engine connects once for each rank, and both ends prove that they know the topology's secret. Then the connection is
the rank's own: the agent starts a process that has it, and the rank ends when the engine closes it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

from quire.parallel.socket_pipes import greet, listen
from quire.parallel.topology import Topology

GREETING_SECONDS = 10.0


class NodeAgent:
    """Listens for engines until it is closed."""

    def __init__(self, topology: Topology, rank: int, say: Callable[[str], None]):
        self._secret, self._say = topology.secret, say
        self._server = listen(topology.nodes[rank].control)
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self) -> None:
        while True:
            try:
                raw, peer = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._welcome, args=(raw, f"{peer[0]}:{peer[1]}"), daemon=True).start()

    def close(self) -> None:
        """Ends the ranks of this machine."""
        self._server.close()
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def _welcome(self, raw: socket.socket, peer: str) -> None:
        with raw:
            try:
                raw.settimeout(GREETING_SECONDS)
                if not greet(raw, self._secret, connects=False):
                    self._say(f"{peer} does not know the secret and was disconnected")
                    return
            except OSError as error:
                self._say(f"{peer} was disconnected: {error}")
                return
            raw.settimeout(None)
            command = [sys.executable, "-m", "quire.startup.rank_process", str(raw.fileno())]
            environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[raw.fileno()], env=environment
            )
        self._processes.append(process)
        self._say(f"a rank for {peer} has started as process {process.pid}")
        self._say(f"the rank of process {process.pid} has ended with exit code {process.wait()}")
