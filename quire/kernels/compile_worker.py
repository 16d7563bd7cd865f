"""Processes that compile kernels for another one, onto the disk where that one will look for them. `quire.rehearsal`
forks them once it has imported torch and Triton, so that they take neither time nor memory for that; `quire.ahead` is
at the other end of their sockets.

Each is told a kernel a line, in JSON, and answers with a line when the kernel lies in Triton's cache, with the
launcher that Triton has a C compiler make for it. It never opens a device: a compiler needs to know its name, no more.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

NICE = 5  # whoever waits for the first token goes first


class StandIn:
    """A driver that knows which device there will be. Nothing can be launched through it."""

    def __init__(self, target: GPUTarget):
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def fork_workers(fds: Sequence[int]) -> list[int]:
    """The processes' ids; each has one of these sockets, and they are closed here. To be called before there are
    threads, and before a device is opened."""
    _prepare()
    gc.freeze()  # else the collector would write into the pages that all of them share
    pids = []
    for index, fd in enumerate(fds):
        pid = os.fork()
        if pid == 0:
            _run_worker(fd, [other for other in fds if other != fd], is_first=index == 0)
        pids.append(pid)
    for fd in fds:
        os.close(fd)
    return pids


def _prepare() -> None:
    """What the first kernel of a process costs besides: Triton hashes itself, hundreds of megabytes."""
    try:
        importlib.import_module("triton.compiler.code_generator")
        importlib.import_module("triton.runtime.cache").triton_key()
    except (ImportError, AttributeError):
        pass  # another version: it is done later, by each


def _run_worker(fd: int, others: Sequence[int], *, is_first: bool) -> None:
    """Never returns: what it was forked from has another way to go."""
    status = 1
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for own in (0, 1):  # the rehearsal's; and compilers may say something
            os.dup2(nowhere, own)
        for other in others:
            os.close(other)
        os.nice(NICE)
        if is_first:
            _build_driver()
        with socket.socket(fileno=fd) as line:
            serve(line)
        status = 0
    finally:
        os._exit(status)


def serve(line: socket.socket) -> None:
    """Until the other end is closed, by whoever had it or with their death."""
    with line.makefile("r") as jobs:
        for text in jobs:
            job = json.loads(text)
            try:
                compile_kernel(job)
            except Exception as error:  # whoever launches it will see for themselves
                print(f"{job.get('name')}: {type(error).__name__}: {error}", file=sys.stderr)
            line.sendall(b"done\n")


def compile_kernel(job: dict[str, Any]) -> Any:
    """`module` and `name` of a kernel, Triton's own description of what it is compiled for, and the `target`."""
    driver.set_active(StandIn(GPUTarget(*job["target"])))
    kernel: Any = importlib.import_module(job["module"])
    for part in job["name"].split("."):
        kernel = getattr(kernel, part)
    compiled = kernel.preload(job["data"])
    if job["target"][0] == "cuda":
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(compiled.src, compiled.metadata)
    return compiled


def _build_driver() -> None:
    """What Triton itself needs before it can launch anything."""
    try:
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()
    except Exception as error:
        print(f"driver: {type(error).__name__}: {error}", file=sys.stderr)
