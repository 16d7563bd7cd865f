"""The HTTP process's side of text work: two worker processes, one for short tasks and one for long ones.

A long task never delays a short one. A worker that dies is replaced; a task that caused it by its own cost is refused,
and a task that lost its worker otherwise is retried once. `InlineTextWork` runs the tasks in the calling process, for
programs without an event loop to protect.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from quire.server.textwork.process import MAX_FRAME, processor_seconds
from quire.server.textwork.tasks import RenderChat, Result, Setup, Task, TaskRefusal, TextTasks, raise_refusal
from quire.types import QuireError

SHORT_BYTES = 64 << 10  # larger tasks go to the worker for long ones
MAX_WAITING = 256  # waiting tasks per worker
MAX_WAITING_BYTES = 256 << 20
START_SECONDS = 60.0
WALL_FACTOR, WALL_SECONDS = 8.0, 30.0  # wall-clock limit per task; the processor may be shared
# Signals that a task causes itself: processor time, memory, a crash of a library. Not every system has all of them.
_SELF_CAUSED = {"SIGPROF", "SIGXCPU", "SIGABRT", "SIGSEGV", "SIGBUS", "SIGFPE"}
OWN_FAULT = frozenset(number for number in signal.Signals if number.name in _SELF_CAUSED)

Log = Callable[..., None]


class TextWork(Protocol):
    """Runs tasks on text, in this process or another."""

    async def run(self, task: Task) -> Any:
        """The task's result. Raises the error of a refused task."""
        ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class InlineTextWork:
    """Runs tasks in the calling process."""

    def __init__(self, tasks: TextTasks):
        self._tasks = tasks

    async def run(self, task: Task) -> Any:
        return checked(self._tasks.run(task))

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class WorkerPool:
    """Runs tasks in worker processes: one for short tasks, one for long ones."""

    def __init__(self, setup: Setup, log: Log):
        self._short = _Lane("short", setup, log)
        self._long = _Lane("long", setup, log)

    async def start(self) -> None:
        """Start the worker for short tasks, so that the first request does not wait for it."""
        await self._short.start()

    async def run(self, task: Task) -> Any:
        payload = _encode(task)
        lane = self._short if len(payload) <= SHORT_BYTES else self._long
        return checked(await lane.run(payload, isinstance(task, RenderChat)))

    async def close(self) -> None:
        await self._short.close()
        await self._long.close()

    @property
    def process_ids(self) -> list[int]:
        return [lane.worker.process_id for lane in (self._short, self._long) if lane.worker is not None]


def checked(result: Result) -> Result:
    if isinstance(result, TaskRefusal):
        raise_refusal(result)
    return result


def _encode(task: Task) -> bytes:
    try:
        payload = msgspec.msgpack.encode(task)
    except UnicodeEncodeError:
        raise QuireError("invalid_text", "The text holds half a surrogate pair.", "Send valid Unicode.") from None
    except (OverflowError, RecursionError, TypeError, ValueError):
        what = "The request holds a number beyond 64 bits, or is nested too deeply."
        raise QuireError("invalid_parameter", what, "Send smaller values.") from None
    if len(payload) > MAX_FRAME:
        raise QuireError("message_too_large", f"The request has {len(payload)} bytes.", "Send less.")
    return payload


class _Lane:
    """One worker and its queue of tasks, in order of arrival."""

    def __init__(self, name: str, setup: Setup, log: Log):
        self.worker: _Worker | None = None
        self._name, self._setup, self._log = name, setup, log
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._waiting_bytes = 0
        self._closed = False

    async def start(self) -> None:
        async with self._turn:
            await self._ready_worker()

    async def run(self, payload: bytes, is_template: bool) -> Result:
        if self._waiting >= MAX_WAITING or (self._waiting and self._waiting_bytes + len(payload) > MAX_WAITING_BYTES):
            what = f"{self._waiting} requests wait for their text to be read."
            raise QuireError("queue_full", what, "Try again a little later.")
        self._waiting += 1
        self._waiting_bytes += len(payload)
        try:
            async with self._turn:
                return await self._run(payload, is_template)
        finally:
            self._waiting -= 1
            self._waiting_bytes -= len(payload)

    async def _run(self, payload: bytes, is_template: bool) -> Result:
        for _ in range(2):
            worker = await self._ready_worker()
            try:
                return await worker.run(payload, processor_seconds(self._setup, len(payload)))
            except _WorkerLost as lost:
                self.worker = None
                self._log("warning", "text worker ended", lane=self._name, exit=lost.exit_code)
                if lost.is_tasks_fault:
                    raise _too_costly(processor_seconds(self._setup, len(payload)), is_template) from None
        what = "The process that reads requests ended twice."
        raise QuireError("engine_lost", what, "Try again; the server's log says more.")

    async def _ready_worker(self) -> _Worker:
        if self._closed:
            raise QuireError("shutting_down", "The server is shutting down.")
        if self.worker is not None and self.worker.has_ended:
            self.worker.kill()
            self.worker = None
        if self.worker is None:
            self.worker = await _Worker.start(self._setup)
        return self.worker

    async def close(self) -> None:
        self._closed = True
        if self.worker is not None:
            self.worker.kill()


def _too_costly(seconds: float, is_template: bool) -> QuireError:
    what = f"took more than {seconds:.0f} s of processor time or too much memory"
    if is_template:
        return QuireError("template_error", f"The chat template {what}.", "Shorten the messages.")
    return QuireError("text_too_large", f"Reading the request {what}.", "Send less.")


class _WorkerLost(Exception):
    def __init__(self, exit_code: int | None, is_tasks_fault: bool):
        super().__init__(f"exit code {exit_code}")
        self.exit_code, self.is_tasks_fault = exit_code, is_tasks_fault


class _Worker:
    def __init__(self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls, setup: Setup) -> _Worker:
        ours, theirs = socket.socketpair()
        try:
            # A session of its own, so that Ctrl-C reaches only the server, which closes the socket when it stops.
            process = subprocess.Popen(
                [sys.executable, "-m", "quire.server.textwork.process", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=1 << 20)
        worker = cls(process, reader, writer)
        try:
            async with asyncio.timeout(START_SECONDS):
                await worker._exchange(msgspec.msgpack.encode(setup))
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            worker.kill()
            what = f"The process that reads requests did not start (exit code {process.poll()})."
            raise QuireError("engine_lost", what, "The server's log says more.") from None
        except BaseException:
            worker.kill()
            raise
        return worker

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._reader.at_eof() or self._process.poll() is not None

    async def run(self, payload: bytes, seconds: float) -> Result:
        """Run one task. `seconds`: processor time after which the kernel ends the worker."""
        done = False
        try:
            async with asyncio.timeout(WALL_SECONDS + WALL_FACTOR * seconds):
                reply = await self._exchange(payload)
            done = True
        except TimeoutError:
            raise _WorkerLost(None, is_tasks_fault=True) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await asyncio.to_thread(self._wait)
            raise _WorkerLost(code, code is not None and code < 0 and -code in OWN_FAULT) from None
        finally:
            if not done:  # also after cancellation: the late reply would be read as the next task's
                self.kill()
        result: Result = msgspec.msgpack.decode(reply, type=Result)
        return result

    async def _exchange(self, payload: bytes) -> bytes:
        self._writer.write(struct.pack("<I", len(payload)))
        self._writer.write(payload)
        await self._writer.drain()
        (length,) = struct.unpack("<I", await self._reader.readexactly(4))
        return await self._reader.readexactly(length)

    def _wait(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(5.0)
        return None

    def kill(self) -> None:
        self._writer.close()
        with suppress(ProcessLookupError):
            self._process.kill()
        # Reap the process in a thread: releasing a gigabyte of memory takes a while.
        asyncio.get_running_loop().run_in_executor(None, self._wait)
