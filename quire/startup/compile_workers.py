"""The worker processes of `compile_ahead`, each with a socket on which it receives one job per line.

`dry_run` forks them after its imports, which they then share without time or memory of their own. They end with the
process that started the dry run.
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

NICE = 5  # the start, on which the first token depends, has priority

Job = dict[str, Any]


def fork_workers(fds: Sequence[int], begin: Callable[[int], object], work: Callable[[Job], object]) -> list[int]:
    """Forks one worker per socket, closes the sockets in this process, and returns the process ids.

    `begin`: called in each worker with its index, before the first job. `work`: called for each job. Must run before
    this process has threads or opens a device.
    """
    gc.freeze()  # else garbage collections would write to the memory pages that all processes share
    pids = []
    for index, fd in enumerate(fds):
        pid = os.fork()
        if pid == 0:
            _run_worker(fd, fds[index + 1 :], partial(begin, index), work)
        pids.append(pid)
        os.close(fd)  # an open copy would hide the worker's end from its reader
    return pids


def _run_worker(fd: int, others: Sequence[int], begin: Callable[[], object], work: Callable[[Job], object]) -> None:
    """Serves jobs, then exits the process; never returns to the code of the forking process."""
    status = 1
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for own in (0, 1):  # stdin and stdout belong to the dry run, and compilers may print
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
    """Runs jobs until the other end of the socket is closed."""
    with line.makefile("r") as jobs:
        for text in jobs:
            _attempt(work, json.loads(text))
            line.sendall(b"done\n")


def _attempt(what: Callable[..., object], *args: Any) -> None:
    try:
        what(*args)
    except Exception as error:  # the start meets and reports the same error
        print(f"{args!s:.80}: {type(error).__name__}: {error}", file=sys.stderr)


def end_with_parent(workers: Sequence[int]) -> None:
    """Waits for the end of stdin, then kills the workers and this process, whatever they do. Runs in a thread."""
    sys.stdin.read()
    for pid in workers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in workers:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
    os._exit(0)
