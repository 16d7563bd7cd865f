"""The engine as the HTTP process sees it: starts the engine process, submits requests, hands out their deltas.

Everything runs on one event loop. The client knows every live request with its prompt and the tokens delivered so far.
When the engine process ends, each of them gets a typed error, and later requests are refused.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from quire.config import Config, knobs
from quire.engine import wire
from quire.types import Delta, FinishReason, QuireError, Request

MAX_UNSENT = 10_000  # frames that wait because the engine does not read; beyond it new work is refused
GRACE_SECONDS = 10.0  # between asking the engine process to stop and ending it


@dataclass(slots=True)
class Live:
    """One request under way: what would be needed to replay it elsewhere, and where its deltas go."""

    request: Request
    ticket: Ticket
    delivered: list[int] = field(default_factory=list)


class Closed(Exception):
    """Whoever waited for deltas was told that nobody wants them any more."""


class Ticket:
    """The deltas of one submission, in the order they came. Leaving early: `close` cancels what is open."""

    def __init__(self, client: EngineClient, ids: Sequence[str]):
        self._client = client
        self._open = set(ids)
        self._news: list[Delta] = []
        self._closed = False
        self._wake: asyncio.Future[None] | None = None

    @property
    def done(self) -> bool:
        return not self._open and not self._news

    async def next(self, patience: float | None = None) -> list[Delta]:
        """All that has come since the last call. Waits for at least one delta, or for `patience` seconds: then, and
        when all is over, there is none. Raises `Closed` once it is closed."""
        if self._closed:
            raise Closed
        if not self._news and self._open:
            loop = asyncio.get_running_loop()
            self._wake = loop.create_future()
            timer = None if patience is None else loop.call_later(patience, self._wake_up)
            try:
                await self._wake
            finally:
                self._wake = None
                if timer is not None:
                    timer.cancel()
            if self._closed:
                raise Closed
        news, self._news = self._news, []
        return news

    def cancel(self, request_id: str) -> None:
        """End one sample; its last delta, with the usage, still comes."""
        if request_id in self._open:
            self._client.cancel([request_id])

    def close(self) -> None:
        """Nobody reads on: cancel what is open and forget it. May be called at any time, and twice."""
        if self._open:
            self._client.forget(list(self._open))
            self._open.clear()
        self._closed = True
        self._news.clear()
        self._wake_up()

    def put(self, delta: Delta) -> None:
        if delta.finish_reason is not None:
            self._open.discard(delta.request_id)
        self._news.append(delta)
        self._wake_up()

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class EngineClient:
    """Use `EngineClient.start`; afterwards `ready` describes the engine and `beat` is its last sign of life."""

    def __init__(self, folder: Path, context: zmq.asyncio.Context, socket: zmq.asyncio.Socket,
                 process: subprocess.Popen[bytes], clock: Callable[[], float] = time.monotonic):  # fmt: skip
        self._folder, self._context, self._socket, self._process = folder, context, socket, process
        self._clock = clock
        self.ready: wire.Ready
        self.beat = wire.Beat()
        self.failure: QuireError | None = None
        self.live: dict[str, Live] = {}
        self.num_waiting_tokens = 0  # prompt tokens of live requests that have no token yet
        self._beat_at = self._progress_at = clock()
        self._unsent: set[asyncio.Future[Any]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self.on_failure: Callable[[QuireError], None] = lambda error: None

    # -- life -----------------------------------------------------------------------------------------------------

    @classmethod
    async def start(cls, command: Sequence[str], config: Config) -> EngineClient:
        """`command` gets the socket's address as one more argument. Raises the engine's own error if it fails."""
        folder = Path(tempfile.mkdtemp(prefix="quire-"))  # only its owner can enter
        address = f"ipc://{folder}/engine"
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.PAIR)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        # A session of its own: Ctrl-C is for us, and we tell the engine when we are done with it.
        process = subprocess.Popen([*command, address], stdin=subprocess.PIPE, stdout=2, start_new_session=True)
        client = cls(folder, context, socket, process)
        try:
            await client._begin(config)
        except BaseException:
            await client.stop(at_once=True)
            raise
        return client

    async def _begin(self, config: Config) -> None:
        await self._socket.send(wire.encode(wire.Start(engine_settings(config))))
        gone = asyncio.create_task(self._exited())
        while True:
            frame = asyncio.ensure_future(self._socket.recv())
            await asyncio.wait({frame, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not frame.done():
                await asyncio.wait({frame}, timeout=0.5)  # its last words may still be on the way
            if not frame.done():
                frame.cancel()
                raise _exit_error(self._process.returncode)
            message = wire.decode_from_engine(frame.result())
            if isinstance(message, wire.Failed):
                raise message.error()
            if isinstance(message, wire.Ready):
                self.ready = message
                break
        self._beat_at = self._progress_at = self._clock()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch(gone))]

    async def stop(self, *, at_once: bool = False) -> None:
        """Ask the engine to stop, wait a little, then end it."""
        self.failure = self.failure or QuireError("engine_closed", "The server is shutting down.")
        if self._process.poll() is None and not at_once:
            self._send(wire.StopEngine())
            deadline = self._clock() + GRACE_SECONDS
            while self._process.poll() is None and self._clock() < deadline:
                await asyncio.sleep(0.02)
        for task in self._tasks:
            task.cancel()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    # -- requests -------------------------------------------------------------------------------------------------

    def submit(self, prompts: Sequence[Sequence[Request]]) -> Ticket:
        """For each prompt its requests, which differ in id and sample index only. All are taken or none."""
        if self.failure is not None:
            raise self.failure
        if len(self._unsent) > MAX_UNSENT:
            raise QuireError("queue_full", "The engine does not take in requests fast enough.", "Try again later.")
        requests = [request for samples in prompts for request in samples]
        for request in requests:
            if request.id in self.live:
                raise QuireError("duplicate_id", f"A request with id {request.id!r} is already running.")
        frames = [wire.encode(wire.submit_message(samples)) for samples in prompts]
        ticket = Ticket(self, [request.id for request in requests])
        for request in requests:
            self.live[request.id] = Live(request, ticket)
            self.num_waiting_tokens += request.prompt_len
        for frame in frames:
            self._send_frame(frame)
        return ticket

    def cancel(self, ids: Sequence[str]) -> None:
        """Their last deltas still come."""
        open_ids = [name for name in ids if name in self.live]
        if open_ids and self.failure is None:
            self._send(wire.CancelMany(open_ids))

    def forget(self, ids: Sequence[str]) -> None:
        """Cancel, and drop whatever still comes of them."""
        self.cancel(ids)
        for name in ids:
            self._drop(name)

    # -- health ---------------------------------------------------------------------------------------------------

    def beat_age(self) -> float:
        """Seconds since the loop last said something between two steps."""
        return self._clock() - self._beat_at

    def progress_age(self) -> float:
        """Seconds since a token was computed while there was work; 0 while there is none."""
        return self._clock() - self._progress_at if self.live else 0.0

    # -- underneath -----------------------------------------------------------------------------------------------

    def _send(self, message: wire.ToEngine) -> None:
        self._send_frame(wire.encode(message))

    def _send_frame(self, frame: bytes) -> None:
        sending: Any = self._socket.send(frame)  # a future that is done at once unless the engine does not read
        if not sending.done():
            self._unsent.add(sending)
            sending.add_done_callback(self._unsent.discard)

    async def _read(self) -> None:
        while True:
            try:
                message = wire.decode_from_engine(await self._socket.recv())
            except QuireError as error:
                self._fail(error)
                return
            if isinstance(message, wire.Deltas):
                for news in message.news:
                    self._deliver(wire.delta_of(news))
            elif isinstance(message, wire.Beat):
                self._take_beat(message)
            elif isinstance(message, wire.Failed):
                self._fail(message.error())
                return

    def _deliver(self, delta: Delta) -> None:
        live = self.live.get(delta.request_id)
        if live is None:
            return  # nobody waits for it any more
        if delta.token_ids:
            if not live.delivered:
                self.num_waiting_tokens -= live.request.prompt_len
            live.delivered += delta.token_ids
            self._progress_at = self._clock()
        if delta.finish_reason is not None:
            self._drop(delta.request_id)
        live.ticket.put(delta)

    def _drop(self, request_id: str) -> None:
        live = self.live.pop(request_id, None)
        if live is not None and not live.delivered:
            self.num_waiting_tokens -= live.request.prompt_len

    def _take_beat(self, beat: wire.Beat) -> None:
        self._beat_at = self._clock()
        if beat.computed_tokens != self.beat.computed_tokens or not beat.running + beat.waiting + beat.held:
            self._progress_at = self._beat_at
        self.beat = beat

    async def _exited(self) -> None:
        """A thread waits, so that no signal handling of the event loop is needed."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def tell() -> None:
            if not ended.done():
                ended.set_result(None)

        def wait() -> None:
            self._process.wait()
            with suppress(RuntimeError):  # the loop may be gone by then
                loop.call_soon_threadsafe(tell)

        threading.Thread(target=wait, name="quire-engine-exit", daemon=True).start()
        await ended

    async def _watch(self, gone: asyncio.Task[None]) -> None:
        await gone
        await asyncio.sleep(0.1)  # let its last words be read first
        self._fail(_exit_error(self._process.returncode))

    def _fail(self, error: QuireError) -> None:
        """The engine is lost: everyone who waits is told."""
        if self.failure is not None:
            return
        self.failure = error
        lost, self.live = self.live, {}
        self.num_waiting_tokens = 0
        for name, live in lost.items():
            live.ticket.put(Delta(name, finish_reason=FinishReason.ERROR, error=str(error), error_code=error.code))
        self.on_failure(error)


def engine_settings(config: Config) -> dict[str, Any]:
    """The settings the engine process builds itself from: all that differ from their defaults, the server's own not."""
    values = {name: item.read(config) for name, item in knobs().items() if item.table != "server"}
    return {name: value for name, value in values.items() if value != knobs()[name].default}


def _exit_error(code: int | None) -> QuireError:
    how = "ended" if code is None else f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return QuireError("engine_lost", f"The engine process {how}.", "Its last words are on stderr; start it again.")
