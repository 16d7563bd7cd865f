"""A text worker process: `python -m quire.server.textwork.process FD` serves tasks that arrive on that socket.

A frame is four bytes of length and a msgpack message. The first frame is the `Setup`; each following one is a task and
gets one result. The kernel ends the process when a task exceeds its processor time, and refuses memory beyond its
limit. The process exits when its socket closes.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from quire.server.textwork.tasks import Result, Setup, Task, TaskRefusal, TextTasks

MAX_FRAME = 1 << 30
KEPT_MEMORY = 256 << 20  # bytes; a process that retains more after a task is replaced
BYTES_PER_SECOND = 400_000  # task bytes per additional second of processor time
NICE = 5  # lower priority than event loop and engine: they serve streams, a worker delays only new requests
TOO_MUCH_MEMORY = "text_too_large"


def processor_seconds(setup: Setup, num_bytes: int) -> float:
    """The processor time of one task. Tokenizers read several megabytes a second; a template has its own limit of 3
    s."""
    return setup.seconds + num_bytes / BYTES_PER_SECOND


def main(descriptor: int) -> int:
    _lower_priority()
    link = socket.socket(fileno=descriptor)
    first = read_frame(link)
    if first is None:
        return 0
    setup = msgspec.msgpack.decode(first, type=Setup)
    tasks = TextTasks.load(setup)
    _limit_memory(setup.memory)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Task)
    write_frame(link, b"")  # ready
    resident = _memory_bytes()[1]
    while (payload := read_frame(link)) is not None:
        signal.setitimer(signal.ITIMER_PROF, processor_seconds(setup, len(payload)))
        result = _run(tasks, decoder, payload)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(link, msgspec.msgpack.encode(result))
        del payload, result
        if _memory_bytes()[1] > resident + KEPT_MEMORY:
            return 0
    return 0


def _limit_memory(more: int) -> None:
    """Lets the kernel refuse `more` bytes beyond what the process has, and keeps a crash from writing a core file."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    memory = _memory_bytes()[0] + more
    if memory > more:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def _lower_priority() -> None:
    """Let the event loop and the engine go first. Linux may schedule the processes of a session as one group, within
    which alone `nice` counts. A worker is a session of its own, so the priority of its group is lowered too."""
    os.nice(NICE)
    with suppress(OSError):  # a system without such groups
        Path("/proc/self/autogroup").write_text(str(NICE))


def _run(tasks: TextTasks, decoder: msgspec.msgpack.Decoder[Any], payload: bytes) -> Result:
    try:
        return tasks.run(decoder.decode(payload))
    except MemoryError:
        what = f"Reading the request took more than {tasks.setup.memory >> 20} MiB of memory."
        return TaskRefusal(TOO_MUCH_MEMORY, what, "Send less.")
    except RecursionError:
        return TaskRefusal("invalid_value", "The request is nested too deeply.", "Send a flatter one.", status=400)


def _memory_bytes() -> tuple[int, int]:
    """Address space and resident memory of this process; zeros on a system without /proc, such as macOS."""
    try:
        with open("/proc/self/statm") as file:
            pages = file.read().split()
    except FileNotFoundError:
        return 0, 0
    size = os.sysconf("SC_PAGE_SIZE")
    return int(pages[0]) * size, int(pages[1]) * size


def read_frame(link: socket.socket) -> bytes | None:
    head = _read(link, 4)
    if head is None:
        return None
    (length,) = struct.unpack("<I", head)
    return _read(link, length) if length <= MAX_FRAME else None


def _read(link: socket.socket, length: int) -> bytes | None:
    buffer = bytearray(length)
    view = memoryview(buffer)
    while view:
        count = link.recv_into(view)
        if not count:
            return None
        view = view[count:]
    return bytes(buffer)


def write_frame(link: socket.socket, payload: bytes) -> None:
    link.sendall(struct.pack("<I", len(payload)) + payload)


if __name__ == "__main__":
    try:
        code = main(int(sys.argv[1]))
    except (KeyboardInterrupt, ConnectionError):
        code = 0
    sys.exit(code)
