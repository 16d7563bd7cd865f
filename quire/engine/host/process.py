"""The engine process: connects to its socket, builds the engine, and drives it with messages from the socket.

`quire serve` starts it through an entry point that passes in the function that builds the engine, since this package
does not import torch. The process exits with its parent, which holds the other end of its stdin.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import zmq

from quire.cache.tiers.seam import TierFault
from quire.config import Config
from quire.config_build import override_config
from quire.engine.grammar.compile_queue import GrammarQueue
from quire.engine.host import wire
from quire.engine.host.driver import Cancel, EngineDriver, Message, Report, Stop, check_engine
from quire.engine.host.flight_record import FlightRecorder, RecordedWorkers, flight_path
from quire.engine.host.frames import MAX_FRAME, FrameReader, FrameWriter
from quire.engine.loop import Engine, StepFault
from quire.engine.trace import FileTracer
from quire.types import Delta, QuireError
from quire.types.control import ControlCommand
from quire.types.sessions import SessionCommand

BEAT_SECONDS = 0.25  # minimum interval of beats while steps run
IDLE_SECONDS = 1.0  # maximum interval while idle; stall_timeout and hang_timeout must be longer
START_SECONDS = 60.0
CHECK_AFTER_SECONDS = 5.0  # idle time before the integrity check that follows each period of work
SEND_SECONDS = 60.0  # an HTTP process that reads nothing for this long counts as lost


@dataclass(frozen=True, slots=True)
class Built:
    """An engine built from a config, with the message that announces it."""

    engine: Engine
    ready: wire.EngineReady
    grammars: GrammarQueue | None = None


Build = Callable[[Config], Built]


class Socket(Protocol):
    """The part of a zmq socket that is used; tests and the chaos gate wrap the real one."""

    def send(self, frame: bytes) -> Any: ...
    def recv(self, flags: int = 0) -> bytes: ...
    def poll(self, timeout: int) -> int: ...


def run_engine_process(address: str, build: Build, wrap_socket: Callable[[Any], Socket] = lambda socket: socket) -> int:
    """Run the engine process from start to end. Returns its exit code."""
    _exit_with_parent()
    context = zmq.Context()
    raw = context.socket(zmq.PAIR)
    raw.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    raw.setsockopt(zmq.SNDTIMEO, int(SEND_SECONDS * 1000))
    raw.setsockopt(zmq.LINGER, 2000)
    raw.connect(address)
    socket = Channel(wrap_socket(raw), raw)
    try:
        config, engine_number = _receive_config(socket)
        tracer = FileTracer(config.engine.trace, engine_number) if config.engine.trace else None
        built = build(replace(config, engine=replace(config.engine, trace=None)))
        built.engine.tracer = tracer or built.engine.tracer
        recorder = FlightRecorder(flight_path(address), 4 * built.engine.scheduler.limits.max_rows)
        built.engine.wrap(lambda workers: RecordedWorkers(workers, recorder))
        socket.send(built.ready)
        driver = EngineDriver(built.engine, SocketMailbox(socket, built.engine), built.grammars)
        driver.run()
        if driver.failure is not None and driver.failure.code != "engine_closed":
            _send_failed(socket, driver.failure)
            return 1
        return 0
    except QuireError as error:
        _send_failed(socket, error)
        return 1
    except Exception as error:
        if os.environ.get("QUIRE_DEBUG", "0") not in ("", "0"):
            import traceback

            traceback.print_exc()
        what = f"The engine failed to start: {type(error).__name__}: {error}."
        _send_failed(socket, QuireError("engine_failed", what, "Set QUIRE_DEBUG=1 for the traceback."))
        return 1
    finally:
        context.destroy()


def ready_message(
    engine: Engine,
    *,
    vocab_size: int,
    max_len: int,
    eos_ids: tuple[int, ...],
    model: str,
    dtype: str,
    defaults: Mapping[str, Any],
    memory: Mapping[str, Any],
    lower: Mapping[str, Any],
) -> wire.EngineReady:
    limits = asdict(engine.scheduler.limits)
    return wire.EngineReady(
        vocab_size, max_len, list(eos_ids), dict(defaults), model, dtype, dict(memory), limits, dict(lower)
    )


class Channel:
    """Messages over a socket, as numbered frames with checksums in both directions."""

    def __init__(self, socket: Socket, raw: zmq.Socket[bytes] | None = None):
        """`raw`: the socket itself, where `socket` wraps one."""
        self._socket = socket
        self._poller = zmq.Poller()
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        self._poller.register(self._wake_read, zmq.POLLIN)
        if raw is not None:
            self._poller.register(raw, zmq.POLLIN)
        self._writer, self._reader = FrameWriter(wire.MARK), FrameReader(wire.MARK)

    def send(self, message: wire.FromEngine) -> None:
        self._socket.send(self._writer.frame(wire.encode(message)))

    def wait(self, seconds: float) -> bool:
        return bool(self._socket.poll(int(seconds * 1000)))

    def wait_or_wake(self, seconds: float) -> None:
        """Wait for a message or a call of `wake`, at most so many seconds."""
        self._poller.poll(int(seconds * 1000))
        with suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def wake(self) -> None:
        with suppress(BlockingIOError):  # the pipe is full, so the wait ends anyway
            os.write(self._wake_write, b"w")

    def receive(self) -> wire.ToEngine | None:
        """Return the next message, or None. Raises if a frame is damaged or missing, which ends the process."""
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            payload = self._reader.open(frame)
            if payload is None:
                self.send(
                    wire.Fault(
                        "foreign_frame",
                        f"A frame of {len(frame)} bytes did not come from the HTTP process and was dropped.",
                    )
                )
                continue
            return wire.decode_to_engine(payload)


class SocketMailbox:
    """The mailbox of the engine process: translates messages of the socket, and sends beats between steps."""

    def __init__(self, socket: Channel, engine: Engine, clock: Callable[[], float] = time.monotonic):
        self._socket = socket
        self._engine = engine
        self._clock = clock
        self._next_beat = 0.0
        self._busy_since: float | None = None
        self._busy_seconds = 0.0
        self._check_at: float | None = None

    def receive(self, block: bool) -> list[Message]:
        self._beat(idle=block)
        self._check_when_idle(block)
        if block:
            self._socket.wait(IDLE_SECONDS)
        messages: list[Message] = []
        while (message := self._socket.receive()) is not None:
            messages += self._open(message)
        if block and messages:  # the work they cause may be done before the next call, which then blocks again
            now = self._clock()
            self._busy_since, self._check_at = now, now + CHECK_AFTER_SECONDS
        return messages

    def wait(self, seconds: float) -> None:
        self._socket.wait_or_wake(seconds)

    def wake(self) -> None:
        self._socket.wake()

    def _check_when_idle(self, idle: bool) -> None:
        """Check the engine once after each period of work. An inconsistency ends the process before it does harm."""
        if not idle:
            self._check_at = self._clock() + CHECK_AFTER_SECONDS
        elif self._check_at is not None and self._clock() > self._check_at:
            self._check_at = None
            problem = check_engine(self._engine).problem
            if problem is not None:
                raise QuireError("check_failed", f"The engine's integrity check failed: {problem.rstrip('.')}.")

    def _open(self, message: wire.ToEngine) -> list[Message]:
        if isinstance(message, wire.Submit):
            return list(wire.submitted_requests(message))
        if isinstance(message, wire.CancelMany):
            return [Cancel(name) for name in message.ids]
        if isinstance(message, wire.StopEngine):
            return [Stop()]
        if isinstance(message, wire.IntegrityCheck | SessionCommand | ControlCommand):
            return [message]
        raise QuireError("bad_message", "The engine received a second start message.")

    def send(self, deltas: list[Delta]) -> None:
        for first in range(0, len(deltas), wire.MAX_BATCH):
            self._socket.send(wire.deltas_message(deltas[first : first + wire.MAX_BATCH]))

    def report(self, report: Report) -> None:
        if isinstance(report, StepFault):
            ids = [report.culprit] if report.culprit is not None else list(report.suspects)
            kind = "step_failed" if report.culprit is not None else "step_split"
            self._socket.send(wire.Fault(kind, f"{report.code}: {report.what}", ids))
        elif isinstance(report, TierFault):
            self._socket.send(wire.Fault("cache_tier", report.what[: wire.MAX_TEXT]))
        else:
            self._socket.send(report)

    def abandon(self, open_ids: Sequence[str], failure: QuireError) -> None:
        """Does nothing: the HTTP process notices the exit and resumes the requests in the next engine."""

    def _beat(self, idle: bool) -> None:
        """Send a beat if one is due, or if the loop has just become idle. `idle`: the loop is about to wait."""
        now = self._clock()
        if self._busy_since is not None:
            self._busy_seconds += now - self._busy_since
        went_idle = idle and self._busy_since is not None
        self._busy_since = None if idle else now
        if now >= self._next_beat or went_idle:
            self._next_beat = now + (IDLE_SECONDS / 2 if idle else BEAT_SECONDS)
            self._socket.send(beat_of(self._engine, self._busy_seconds))


def beat_of(engine: Engine, busy_seconds: float = 0.0) -> wire.Beat:
    scheduler = engine.scheduler
    stats, cache = scheduler.stats, scheduler.cache
    running, waiting, loading = len(scheduler.running), len(scheduler.waiting), len(scheduler.table.loading)
    return wire.Beat(
        steps=stats.steps,
        computed_tokens=stats.computed_tokens,
        sampled_tokens=stats.sampled_tokens,
        preemptions=stats.preemptions,
        ended=stats.ended,
        running=running,
        waiting=waiting,
        held=len(scheduler.requests) - running - waiting - loading,
        lookup_tokens=cache.stats.lookup_tokens,
        hit_tokens=cache.stats.hit_tokens,
        evicted_units=cache.stats.evicted_units,
        busy_seconds=busy_seconds,
        groups=[
            wire.GroupUsage(
                spec.group, pool.num_units - 1, cache.available(group), cache.available(group) - pool.num_free
            )
            for group, (spec, pool) in enumerate(zip(cache.specs, cache.pools, strict=True))
        ],
        rows=stats.rows,
        prompt_rows=stats.prompt_rows,
        prompt_tokens=stats.prompt_tokens,
        recent=list(stats.recent),
        batch_sizes=list(stats.batch_sizes),
        suspects=engine.num_suspects,
        state=engine.states.state.value,
        transitions=dict(engine.states.counts),
        at=scheduler.clock(),
        speculation=scheduler.speculation,
        is_paused=engine.is_held,
        tiers=[wire.TierUsage(name, **asdict(stats)) for name, stats in cache.tier_stats()],
        loading=loading,
        loaded_tokens=cache.stats.loaded_tokens,
        refused_loads=cache.tiers.num_refused if cache.tiers is not None else 0,
        stage_idle=stats.idle_shares(),
    )


def _receive_config(socket: Channel) -> tuple[Config, int]:
    """Receive the config, and the number of this engine among those of the server."""
    socket.wait(START_SECONDS)
    message = socket.receive()
    if message is None:
        raise QuireError("engine_failed", f"The engine received no start message within {START_SECONDS:.0f} s.")
    if not isinstance(message, wire.Start):
        raise QuireError("bad_message", "The engine received another message before its start message.")
    return override_config(Config(), message.settings), message.engine_number


def _send_failed(socket: Channel, error: QuireError) -> None:
    try:
        socket.send(wire.Failed(error.code, error.what[: wire.MAX_TEXT], error.hint, error.param))
    except zmq.ZMQError:  # the HTTP process is gone; the exit code still reports the failure
        print(f"quire engine: {error}", file=sys.stderr)


def _exit_with_parent() -> None:
    """Exit when stdin ends, which it does when the parent has exited for any reason."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="quire-parent", daemon=True).start()
