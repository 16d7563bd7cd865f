"""The processes that compile for `quire.startup`: forked once all is imported, so that they take neither time nor
memory for that, told a job a line through a socket of their own, and gone when whoever started them is.
`dry_run` forks them.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

NICE = 5  # whoever waits for the first token goes first

Job = dict[str, Any]


def fork_workers(fds: Sequence[int], begin: Callable[[int], object], work: Callable[[Job], object]) -> list[int]:
    """The processes' ids; each has one of these sockets, which are closed here. `begin`: what each does before its
    first job, told which of them it is. To be called before there are threads, and before a device is opened."""
    gc.freeze()  # else the collector would write into the pages that all of them share
    pids = []
    for index, fd in enumerate(fds):
        pid = os.fork()
        if pid == 0:
            _run_worker(fd, fds[index + 1 :], partial(begin, index), work)
        pids.append(pid)
        os.close(fd)  # or nobody would hear of that worker's end
    return pids


def _run_worker(fd: int, others: Sequence[int], begin: Callable[[], object], work: Callable[[Job], object]) -> None:
    """Never returns: what it was forked from has another way to go."""
    status = 1
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for own in (0, 1):  # those of whom it was forked from; and compilers may say something
            os.dup2(nowhere, own)
        for other in others:
            os.close(other)
        os.nice(NICE)
        _attempt(begin)
        with socket.socket(fileno=fd) as line:
            _serve(line, work)
        status = 0
    finally:
        os._exit(status)


def _serve(line: socket.socket, work: Callable[[Job], object]) -> None:
    """Until the other end is closed, by whoever had it or with their death."""
    with line.makefile("r") as jobs:
        for text in jobs:
            _attempt(work, json.loads(text))
            line.sendall(b"done\n")


def _attempt(what: Callable[..., object], *args: Any) -> None:
    try:
        what(*args)
    except Exception as error:  # whoever launches it will see for themselves
        print(f"{args!s:.80}: {type(error).__name__}: {error}", file=sys.stderr)


def end_with_parent(workers: Sequence[int]) -> None:
    """In a thread: whatever they are at, the workers and this process live no longer than who has the other end of
    stdin."""
    sys.stdin.read()
    for pid in workers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in workers:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
    os._exit(0)
