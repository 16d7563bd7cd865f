"""The engine process: connects to the socket it is told, builds the engine, and drives it with messages from there.

`quire serve` starts it through an entry that hands in the function that builds the engine, since this room knows no
torch. It lives exactly as long as its parent: the parent holds the other end of its stdin.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import zmq

from quire.config import Config
from quire.config_build import override_config
from quire.engine import wire
from quire.engine.driver import Cancel, EngineDriver, Message, Stop
from quire.engine.grammar_desk import GrammarDesk
from quire.engine.loop import Engine
from quire.types import Delta, QuireError

BEAT_SECONDS = 0.25  # at most this often while steps run
IDLE_SECONDS = 1.0  # and at least this often while nothing does
START_SECONDS = 60.0
SEND_SECONDS = 60.0  # the HTTP process reads all the time; one that does not for this long is lost


@dataclass(frozen=True, slots=True)
class Built:
    """What the entry of an engine process makes of a config."""

    engine: Engine
    ready: wire.Ready
    desk: GrammarDesk | None = None


Build = Callable[[Config], Built]


def run_engine_process(address: str, build: Build) -> int:
    """The whole life of the engine process; returns its exit code."""
    _leave_with_parent()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME)
    socket.setsockopt(zmq.SNDTIMEO, int(SEND_SECONDS * 1000))
    socket.setsockopt(zmq.LINGER, 2000)
    socket.connect(address)
    try:
        built = build(_first_config(socket))
        socket.send(wire.encode(built.ready))
        driver = EngineDriver(built.engine, SocketMailbox(socket, built.engine), built.desk)
        driver.run()
        if driver.failure is not None and driver.failure.code != "engine_closed":
            _say_failed(socket, driver.failure)
            return 1
        return 0
    except QuireError as error:
        _say_failed(socket, error)
        return 1
    except Exception as error:
        if os.environ.get("QUIRE_DEBUG", "0") not in ("", "0"):
            import traceback

            traceback.print_exc()
        what = f"The engine failed to start: {type(error).__name__}: {error}."
        _say_failed(socket, QuireError("engine_failed", what, "Set QUIRE_DEBUG=1 for the traceback."))
        return 1
    finally:
        context.destroy()


def ready_message(engine: Engine, *, vocab_size: int, max_len: int, eos_ids: tuple[int, ...], model: str, dtype: str,
                  defaults: Mapping[str, Any], memory: Mapping[str, Any]) -> wire.Ready:  # fmt: skip
    limits = asdict(engine.scheduler.limits)
    return wire.Ready(vocab_size, max_len, list(eos_ids), dict(defaults), model, dtype, dict(memory), limits)


class SocketMailbox:
    """Messages of the HTTP process as the driver wants them, and a beat between steps."""

    def __init__(self, socket: zmq.Socket[bytes], engine: Engine, clock: Callable[[], float] = time.monotonic):
        self._socket = socket
        self._engine = engine
        self._clock = clock
        self._next_beat = 0.0
        self._busy_since: float | None = None
        self._busy_seconds = 0.0

    def receive(self, block: bool) -> list[Message]:
        self._beat(idle=block)
        if block:
            self._socket.poll(int(IDLE_SECONDS * 1000))
        messages: list[Message] = []
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages += self._open(frame)

    def _open(self, frame: bytes) -> list[Message]:
        message = wire.decode_to_engine(frame)
        if isinstance(message, wire.Submit):
            return list(wire.submitted_requests(message))
        if isinstance(message, wire.CancelMany):
            return [Cancel(name) for name in message.ids]
        if isinstance(message, wire.StopEngine):
            return [Stop()]
        raise QuireError("bad_message", "The engine was told to start a second time.")

    def send(self, deltas: list[Delta]) -> None:
        for first in range(0, len(deltas), wire.MAX_BATCH):
            batch = deltas[first : first + wire.MAX_BATCH]
            self._socket.send(wire.encode(wire.Deltas([wire.news_of(delta) for delta in batch])))

    def _beat(self, idle: bool) -> None:
        """`idle`: the loop is about to wait. Going idle is news, so it is told at once."""
        now = self._clock()
        if self._busy_since is not None:
            self._busy_seconds += now - self._busy_since
        went_idle = idle and self._busy_since is not None
        self._busy_since = None if idle else now
        if now >= self._next_beat or went_idle:
            self._next_beat = now + (IDLE_SECONDS / 2 if idle else BEAT_SECONDS)
            self._socket.send(wire.encode(beat_of(self._engine, self._busy_seconds)))


def beat_of(engine: Engine, busy_seconds: float = 0.0) -> wire.Beat:
    scheduler = engine.scheduler
    stats, cache = scheduler.stats, scheduler.cache
    running, waiting = len(scheduler.running), len(scheduler.waiting)
    return wire.Beat(
        steps=stats.steps,
        computed_tokens=stats.computed_tokens,
        sampled_tokens=stats.sampled_tokens,
        preemptions=stats.preemptions,
        ended=stats.ended,
        running=running,
        waiting=waiting,
        held=len(scheduler.requests) - running - waiting,
        lookup_tokens=cache.stats.lookup_tokens,
        hit_tokens=cache.stats.hit_tokens,
        evicted_units=cache.stats.evicted_units,
        busy_seconds=busy_seconds,
        groups=[
            wire.Group(spec.group, pool.num_units - 1, cache.available(group), cache.available(group) - pool.num_free)
            for group, (spec, pool) in enumerate(zip(cache.specs, cache.pools, strict=True))
        ],
        rows=stats.rows,
        prompt_rows=stats.prompt_rows,
        prompt_tokens=stats.prompt_tokens,
        recent=list(stats.recent),
    )


def _first_config(socket: zmq.Socket[bytes]) -> Config:
    if not socket.poll(int(START_SECONDS * 1000)):
        raise QuireError("engine_failed", f"Nobody told the engine what to run within {START_SECONDS:.0f} s.")
    message = wire.decode_to_engine(socket.recv())
    if not isinstance(message, wire.Start):
        raise QuireError("bad_message", "The engine's first message was not the one that starts it.")
    return override_config(Config(), message.settings)


def _say_failed(socket: zmq.Socket[bytes], error: QuireError) -> None:
    try:
        socket.send(wire.encode(wire.Failed(error.code, error.what[: wire.MAX_TEXT], error.hint, error.param)))
    except zmq.ZMQError:  # nobody listens any more; the exit code still tells
        print(f"quire engine: {error}", file=sys.stderr)


def _leave_with_parent() -> None:
    """The end of stdin is the end of the parent, however it ended; an engine without one is of no use."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="quire-parent", daemon=True).start()
