"""The link to one engine process: its start, its socket, its end. The supervisor creates one per engine process.

Each link has its own folder and socket, so a message of a dead engine can't reach the client of the next one. A lost or
damaged frame ends the link; the next engine resumes the live requests from the tokens that were delivered.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from quire.engine.host import wire
from quire.engine.host.flight_record import flight_path, read_flight_record
from quire.engine.host.frames import MAX_FRAME, FrameReader, FrameWriter
from quire.types import QuireError

GRACE_SECONDS = 10.0  # between asking the engine process to stop and ending it
DRAIN_SECONDS = 0.2  # wait for messages that a dead engine sent before its end


class EngineLink:
    """One engine process and its socket. `EngineLink.start` creates it."""

    ready: wire.EngineReady

    def __init__(
        self, folder: Path, context: zmq.asyncio.Context, socket: zmq.asyncio.Socket, process: subprocess.Popen[bytes]
    ):
        self._folder, self._context, self._socket, self._process = folder, context, socket, process
        self._writer, self._reader = FrameWriter(wire.MARK), FrameReader(wire.MARK)
        self._unsent: set[asyncio.Future[Any]] = set()
        self.in_flight_at_exit: set[str] = set()  # after the end: ids of the requests in steps in flight
        self._exit_task = asyncio.create_task(self._wait_for_exit())

    @classmethod
    async def start(
        cls, command: Sequence[str], settings: Mapping[str, Any], start_timeout: float, number: int = 1
    ) -> EngineLink:
        """Start `command` with the socket's address as its last argument; return when the engine is ready.

        Raises the engine's own error if its start fails, and `engine_lost` after `start_timeout` seconds. `number`
        counts the engine processes of this server.
        """
        folder = Path(tempfile.mkdtemp(prefix="quire-"))  # readable by this user only
        context = zmq.asyncio.Context()
        try:
            socket = context.socket(zmq.PAIR)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
            socket.setsockopt(zmq.LINGER, 0)
            address = f"ipc://{folder}/engine"
            socket.bind(address)
            # A session of its own: Ctrl-C reaches the HTTP process only, which stops the engine when it has drained.
            process = subprocess.Popen([*command, address], stdin=subprocess.PIPE, stdout=2, start_new_session=True)
        except BaseException:
            context.destroy(linger=0)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        link = cls(folder, context, socket, process)
        try:
            await asyncio.wait_for(link._handshake(settings, number), start_timeout)
        except TimeoutError:
            await link.end()
            what = f"The engine was not ready after {start_timeout:.0f} s."
            raise QuireError("engine_lost", what, "Raise --start-timeout if loading takes that long.") from None
        except BaseException:
            await link.end()
            raise
        return link

    async def _handshake(self, settings: Mapping[str, Any], number: int) -> None:
        self.send(wire.Start(dict(settings), number))
        while True:
            message = await self.receive()
            if isinstance(message, wire.EngineReady):
                self.ready = message
                return

    # -- messages -------------------------------------------------------------------------------------------------

    def send(self, message: wire.ToEngine) -> None:
        self.send_payload(wire.encode(message))

    def send_payload(self, payload: bytes) -> None:
        # The send is done immediately unless the engine does not read.
        sending: Any = self._socket.send(self._writer.frame(payload))
        if not sending.done():
            self._unsent.add(sending)
            sending.add_done_callback(self._unsent.discard)

    @property
    def num_unsent(self) -> int:
        return len(self._unsent)

    async def receive(self) -> wire.FromEngine:
        """Return the next message. Raises a QuireError with the most specific known reason when the engine is lost."""
        while True:
            incoming = asyncio.ensure_future(self._socket.recv())
            await asyncio.wait({incoming, self._exit_task}, return_when=asyncio.FIRST_COMPLETED)
            if not incoming.done():
                await asyncio.wait({incoming}, timeout=DRAIN_SECONDS)
            if not incoming.done():
                incoming.cancel()
                raise exit_error(self._process.returncode)
            payload = self._reader.open(incoming.result())
            if payload is None:
                continue  # a foreign or duplicated frame
            message = wire.decode_from_engine(payload)
            if isinstance(message, wire.Failed):
                raise message.error()
            return message

    # -- the process ----------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    def is_stopped(self) -> bool:
        """Whether the process is stopped (SIGSTOP, a debugger); False where /proc does not exist."""
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return False
        # The state follows the process name, which may contain any character, in parentheses.
        return stat.rpartition(")")[2].split()[:1] in (["T"], ["t"])

    def memory(self) -> int | None:
        """Resident bytes of the engine process; None where /proc does not exist."""
        try:
            pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, IndexError):
            return None

    async def stop(self) -> None:
        """Ask the engine to stop, wait up to `GRACE_SECONDS`, then kill it."""
        if self._process.poll() is None:
            self.send(wire.StopEngine())
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._exit_task), GRACE_SECONDS)
        await self.end()

    async def end(self) -> None:
        """Kill the process and read its flight record. May be called twice."""
        if self._process.poll() is None:
            self._process.kill()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._exit_task), GRACE_SECONDS)
        self._exit_task.cancel()
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        self._context.destroy(linger=0)
        if self._folder.exists():
            self.in_flight_at_exit = read_flight_record(flight_path(f"ipc://{self._folder}/engine"))
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _wait_for_exit(self) -> None:
        """Return when the process has exited. A thread waits for it, so the event loop needs no signal handler."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def set_ended() -> None:
            if not ended.done():
                ended.set_result(None)

        def wait() -> None:
            self._process.wait()
            with suppress(RuntimeError):  # the event loop may be closed by then
                loop.call_soon_threadsafe(set_ended)

        threading.Thread(target=wait, name="quire-engine-exit", daemon=True).start()
        await ended


def exit_error(code: int | None) -> QuireError:
    how = "ended" if code is None else f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return QuireError("engine_lost", f"The engine process {how}.", "Its output is on stderr.")
