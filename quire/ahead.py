"""Compiles the kernels of a start that finds none of them on disk, in processes beside it, while torch is imported and
weights are read. `LLM`, `AsyncLLM` and the engine process start it before they import torch.

One process rehearses the start and tells which kernels it will launch (`quire.rehearsal`); the others compile them
(`quire.kernels.compile_worker`). The start finds each on disk when it comes to it, waits for one that is under way, and
compiles one that nobody has begun itself. Nothing depends on any of this: whatever fails here is left to the start.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from quire.config import Config
from quire.config_build import engine_settings
from quire.machine import Machine, installed_version, may_have_gpu, nvidia_card_names, read_machine

FEWEST_CORES = 4
MOST_WORKERS = 12
WORKER_BYTES = 1 << 30  # what a worker may take of the host's memory: torch, a compiler
PATIENCE_SECONDS = 60.0  # for a kernel that somebody else compiles
ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "quire/kernels/triton"
OTHER_SETTINGS = ("hub_token", "offline", "trace")  # whatever they say, the kernels are the same

Key = tuple[str, str, str]  # of a kernel: its module, its name, what it is compiled for


class State(Enum):
    QUEUED = 1
    RUNNING = 2
    ENDED = 3  # it lies on disk, or nobody tries any more


def start_compilers(config: Config) -> Compilers | None:
    """None where there is nothing to gain: no GPU, too few cores, or all of this has been compiled before."""
    if config.engine.device == "cpu" or config.engine.kernels == "torch" or not may_have_gpu():
        return None
    num_workers, stamp = count_workers(read_machine()), stamp_path(config, nvidia_card_names())
    if num_workers == 0 or stamp.exists() or find_spec("triton") is None:
        return None
    return Compilers(engine_settings(config), num_workers, stamp)


def count_workers(machine: Machine) -> int:
    """The start itself and the rehearsal have a core each."""
    if machine.num_usable_cores < FEWEST_CORES:
        return 0
    fitting = MOST_WORKERS if machine.memory_available is None else machine.memory_available // (2 * WORKER_BYTES)
    return min(MOST_WORKERS, machine.num_usable_cores - 2, fitting)


def stamp_path(config: Config, cards: tuple[str, ...]) -> Path:
    """The file that says: a start such as this one has left its kernels here. It lies in Triton's cache, and goes when
    that goes."""
    settings = {name: value for name, value in engine_settings(config).items() if name not in OTHER_SETTINGS}
    versions = [sys.version, *(installed_version(name) for name in ("torch", "triton"))]
    sources = [(path.name, path.stat().st_mtime_ns) for path in sorted(SOURCES.glob("*.py"))]
    text = json.dumps([settings, versions, sources, cards], sort_keys=True, default=str)
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    folder = os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")
    return Path(folder, "quire", hashlib.sha256(text.encode()).hexdigest()[:32])


class Compilers:
    def __init__(self, settings: dict[str, Any], num_workers: int, stamp: Path, *,
                 rehearsal: str = "quire.rehearsal", worker: str = "quire.kernels.compile_worker"):  # fmt: skip
        """`rehearsal`, `worker`: the modules that are run."""
        self._stamp = stamp
        self._changed = threading.Condition()
        self._states: dict[Key, State] = {}
        self._queue: deque[tuple[Key, str]] = deque()  # kernels, and the line that asks for each
        self._listed = False  # no more will come
        self._num_working = num_workers
        self._is_whole = True  # nothing has gone wrong
        _run_thread(self._list_kernels, _start(rehearsal), settings)
        for index in range(num_workers):
            _run_thread(self._feed, _start(worker, *(["--driver"] if index == 0 else [])))

    def attach(self) -> None:
        """From now on, whoever is about to compile one of these kernels in this process waits for it instead. Called
        where Triton is imported anyway."""
        from triton import knobs

        def hook(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
            self.settle((fn.module, fn.name, compile["specialization_data"]))
            return False  # go on: what was compiled is found on disk

        knobs.runtime.jit_cache_hook = hook

    def settle(self, key: Key) -> None:
        """Returns when this kernel is compiled, or when the caller should do it."""
        with self._changed:
            if self._states.get(key) is State.QUEUED:
                self._states[key] = State.ENDED  # quicker than waiting for its turn
            self._changed.wait_for(lambda: self._states.get(key) is not State.RUNNING, PATIENCE_SECONDS)

    def wait(self) -> None:
        """Until all of it is done; for tests and measurements."""
        with self._changed:
            self._changed.wait_for(lambda: self._listed and self._num_working == 0)

    # -- in threads of their own ------------------------------------------------------------------------------------

    def _list_kernels(self, rehearsal: subprocess.Popen[str], settings: dict[str, Any]) -> None:
        try:
            _say(rehearsal, json.dumps(settings))
            for line in _lines(rehearsal):
                kernel = json.loads(line)
                key = (kernel["module"], kernel["name"], kernel["data"])
                with self._changed:
                    if key not in self._states:
                        self._states[key] = State.QUEUED
                        self._queue.append((key, line.strip()))
                        self._changed.notify_all()
        finally:
            ended_well = _end(rehearsal)
            with self._changed:
                self._listed = True
                self._is_whole &= ended_well
                self._changed.notify_all()

    def _feed(self, worker: subprocess.Popen[str]) -> None:
        try:
            answers = _lines(worker)
            while (job := self._next()) is not None:
                key, line = job
                try:
                    _say(worker, line)
                    answered = bool(answers.readline())
                finally:
                    self._mark(key, State.ENDED)
                if not answered:
                    break
        finally:
            ended_well = _end(worker)
            with self._changed:
                self._num_working -= 1
                self._is_whole &= ended_well
                if self._listed and self._num_working == 0 and self._is_whole:
                    self._leave_stamp()
                self._changed.notify_all()

    def _next(self) -> tuple[Key, str] | None:
        """The next kernel that nobody has begun; None: there will be none any more."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._queue or self._listed)
                if not self._queue:
                    return None
                key, line = self._queue.popleft()
                if self._states[key] is State.QUEUED:
                    self._states[key] = State.RUNNING
                    return key, line

    def _mark(self, key: Key, state: State) -> None:
        with self._changed:
            self._states[key] = state
            self._changed.notify_all()

    def _leave_stamp(self) -> None:
        with suppress(OSError):  # the next start rehearses again
            self._stamp.parent.mkdir(parents=True, exist_ok=True)
            self._stamp.touch()


# ---------------------------------------------------------------------------------------------------------------------
# Processes. Each lives no longer than its parent: it reads to the end of its stdin, whose other end is ours alone.


def _start(module: str, *options: str) -> subprocess.Popen[str]:
    # A checkout need not be installed, nor be where we are.
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", module, *options], env=env, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)  # fmt: skip


def _run_thread(target: Any, *args: Any) -> None:
    def run() -> None:
        with suppress(OSError, ValueError, KeyError):  # a process that died: its share is left to the start itself
            target(*args)

    threading.Thread(target=run, name="quire compilers", daemon=True).start()


def _say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _lines(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def _end(process: subprocess.Popen[str]) -> bool:
    """Whether it ended well."""
    with suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
    return process.wait() == 0
