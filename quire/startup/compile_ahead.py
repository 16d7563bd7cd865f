"""Compiles missing Triton kernels in parallel processes while a start imports torch and reads weights.

`early_init.open_engine` starts it before it imports torch. One process performs a dry run (`dry_run`) and lists the
kernels that the start will launch; workers that it forked earlier (`compile_workers`) compile them. When the start
needs a kernel, it finds it in Triton's cache, waits for the worker that compiles it, or compiles it itself if no worker
has begun. Kernels of larger steps follow last. Nothing depends on this module: the start does whatever fails here.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quire.config import Config, knobs
from quire.config_build import engine_settings
from quire.machine import Machine, installed_version, may_have_gpu, nvidia_card_names, read_machine

MIN_CORES = 4
MAX_WORKERS = 12
WORKER_BYTES = 1 << 28  # host memory of a worker and its compilers
DRY_RUN_BYTES = 1 << 30  # host memory of the dry run
# Total seconds that a start waits: for the dry run, about as fast as the start, to list a kernel; and for workers to
# compile kernels.
LIST_WAIT_SECONDS = 3.0
COMPILE_WAIT_SECONDS = 60.0
ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "quire/kernels/triton"
UNRELATED_SETTINGS = ("hub_token", "offline", "trace")  # settings without influence on kernels
NEEDED = "needed"  # line of the dry run after the last kernel that the first token needs
END = "end"  # last line of the dry run

Key = tuple[str, str, str]  # module, name and specialization of a kernel


class State(Enum):
    """The progress of one kernel."""

    QUEUED = 1
    RUNNING = 2
    ENDED = 3  # on disk, or no worker will compile it


def start_compilers(config: Config) -> Compilers | None:
    """Starts the dry run and the workers; None without a GPU, with few cores, or if nothing is to be compiled."""
    if config.engine.device == "cpu" or config.engine.kernels == "torch" or not may_have_gpu():
        return None
    with suppress(OSError):
        num_workers, stamp = count_workers(read_machine()), stamp_path(config, nvidia_card_names())
        if num_workers > 0 and find_spec("triton") and not stamp.exists() and _may_create(stamp):
            return Compilers(kernel_settings(config), num_workers, stamp)
    return None


def kernel_settings(config: Config) -> dict[str, Any]:
    """Returns the settings that may influence which kernels are launched, and how."""
    return {name: value for name, value in engine_settings(config).items() if name not in UNRELATED_SETTINGS}


def count_workers(machine: Machine) -> int:
    """Returns the number of workers, which leaves a core each to the start and to the dry run."""
    if machine.num_usable_cores < MIN_CORES:
        return 0
    most = min(MAX_WORKERS, machine.num_usable_cores - 2)
    if machine.memory_available is None:
        return most
    spare = machine.memory_available // 2 - DRY_RUN_BYTES  # half is left to the start
    return max(0, min(most, spare // WORKER_BYTES))


def stamp_path(config: Config, cards: tuple[str, ...]) -> Path:
    """Returns the path of the file which marks that all kernels of such a start are compiled.

    It is in Triton's cache directory, so that it is deleted together with the kernels.
    """
    versions = [sys.version, *(installed_version(name) for name in ("torch", "triton"))]
    sources = [(str(path.relative_to(SOURCES)), path.stat().st_mtime_ns) for path in list_sources(SOURCES)]
    text = json.dumps([kernel_settings(config), versions, sources, cards], sort_keys=True, default=str)
    return kernel_folder() / hashlib.sha256(text.encode()).hexdigest()[:32]


def list_sources(place: Path) -> list[Path]:
    """Returns every Python file of a module or package, including subfolders.

    A missing place is a programming error: a stamp that does not depend on its sources would outlive their changes.
    """
    paths = [place] if place.is_file() else sorted(place.rglob("*.py"))
    if not paths:
        raise RuntimeError(f"{place} holds no Python source. Update the list of sources that names it.")
    return paths


def kernel_folder() -> Path:
    """Returns this package's folder in Triton's cache of compiled kernels."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    folder = os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")
    return Path(folder, "quire")


def _may_create(stamp: Path) -> bool:
    """Whether Triton's cache is writable, without which kernels can't be shared between processes."""
    existing = next(folder for folder in stamp.parents if folder.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


@dataclass(slots=True)
class _WaitBudget:
    """A time budget for several waits."""

    left: float  # seconds

    def wait_for(self, condition: threading.Condition, predicate: Callable[[], bool]) -> None:
        """Waits until the predicate holds or the budget is used up."""
        start = time.monotonic()
        condition.wait_for(predicate, self.left)
        self.left = max(0.0, self.left - (time.monotonic() - start))


class Compilers:
    """The dry run and the workers of one start, and the state of every kernel they know."""

    def __init__(
        self, settings: dict[str, Any], num_workers: int, stamp: Path, *, dry_run: str = "quire.startup.dry_run"
    ):
        """`dry_run`: module of the dry run, which receives one socket per worker that it forks."""
        self._stamp = stamp
        self._changed = threading.Condition()
        self._states: dict[Key, State] = {}
        self._queue: deque[tuple[Key, str]] = deque()  # (kernel, line for the worker)
        self._not_needed: set[Key] = set()  # kernels that the first token does not need
        self._needed_listed = False  # all kernels that the first token needs are listed
        self._listed = False  # all kernels are listed
        self._is_complete = True  # no process has failed so far
        self._num_working = num_workers  # live workers
        self._num_idle = 0  # live workers without a kernel
        self._list_wait, self._compile_wait = _WaitBudget(LIST_WAIT_SECONDS), _WaitBudget(COMPILE_WAIT_SECONDS)
        self._detach: Callable[[], None] | None = None
        lines = [socket.socketpair() for _ in range(num_workers)]
        self._process = _start(dry_run, [child.fileno() for _, child in lines])
        _run_thread(self._list_kernels, settings)
        for own, child in lines:
            child.close()
            _run_thread(self._feed, own)

    def attach(self) -> None:
        """Hooks into Triton so that this process waits for a kernel's worker instead of compiling the kernel itself.

        The hook is removed when the last worker ends. This imports Triton, so call it only if Triton is needed anyway.
        """
        try:
            from triton import knobs

            before = knobs.runtime.jit_cache_hook
        except (ImportError, AttributeError):  # a Triton version without this hook: this process compiles everything
            return

        def hook(**launch: Any) -> Any:
            with suppress(ImportError, AttributeError):  # Triton's hash takes half a second, once, and is needed next
                import_module("triton.runtime.cache").triton_key()
            with suppress(KeyError, AttributeError):
                self.wait_for_kernel((launch["fn"].module, launch["fn"].name, launch["compile"]["specialization_data"]))
            return before(**launch) if before is not None else False  # False: Triton looks on disk next

        def detach() -> None:
            if knobs.runtime.jit_cache_hook is hook:
                knobs.runtime.jit_cache_hook = before

        with self._changed:
            if self._num_working > 0:
                knobs.runtime.jit_cache_hook, self._detach = hook, detach

    def wait_for_kernel(self, key: Key) -> None:
        """Waits until this kernel is compiled, or until the caller should compile it."""
        with self._changed:
            self._list_wait.wait_for(self._changed, lambda: key in self._states or self._needed_listed)
            self._compile_wait.wait_for(self._changed, lambda: self._is_ended(key) or self._is_stuck(key))
            if self._is_stuck(key):
                self._mark(key, State.ENDED)  # compiling it here is faster than waiting for a worker

    def _is_ended(self, key: Key) -> bool:
        return self._states.get(key, State.ENDED) is State.ENDED

    def _is_stuck(self, key: Key) -> bool:
        """Whether the kernel is queued while every worker is busy."""
        return self._states.get(key) is State.QUEUED and self._num_idle == 0

    def wait(self) -> None:
        """Waits until every process has ended; for tests and measurements."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_working == 0)
        self._process.wait()

    # -- in threads of their own ------------------------------------------------------------------------------------

    def _list_kernels(self, settings: dict[str, Any]) -> None:
        lines, is_complete = self._process.stdout, False
        assert lines is not None
        try:
            _send_line(self._process, json.dumps(settings | {"offline": True}))
            for line in lines:
                if is_complete := line.strip() == END:
                    break
                if line.strip() == NEEDED:
                    self._mark_listed()
                else:
                    self._queue_kernel(json.loads(line), line.strip())
        finally:
            lines.close()
            with self._changed:
                self._listed = True
                self._mark_listed(is_complete or self._needed_listed)

    def _queue_kernel(self, kernel: dict[str, str], line: str) -> None:
        key = (kernel["module"], kernel["name"], kernel["data"])
        with self._changed:
            if key not in self._states:
                self._queue.append((key, line))
                if self._needed_listed:
                    self._not_needed.add(key)
                self._mark(key, State.QUEUED)

    def _mark_listed(self, is_complete: bool = True) -> None:
        """Records that all needed kernels are listed."""
        with self._changed:
            self._needed_listed = True
            self._is_complete &= is_complete
            self._write_stamp_if_done()
            self._changed.notify_all()

    def _feed(self, line: socket.socket) -> None:
        """Sends kernels to one worker for as long as it answers."""
        try:
            with line, line.makefile("r") as answers:
                while (job := self._next()) is not None:
                    key, text = job
                    answered = False
                    try:
                        line.sendall(text.encode() + b"\n")
                        answered = bool(answers.readline())
                    finally:
                        with self._changed:
                            self._is_complete &= answered
                            self._mark(key, State.ENDED)
                    if not answered:
                        break
        finally:
            self._end_worker()

    def _next(self) -> tuple[Key, str] | None:
        """Returns the next queued kernel; None if no more will come."""
        with self._changed:
            while True:
                self._num_idle += 1
                self._changed.wait_for(lambda: self._queue or self._listed)
                self._num_idle -= 1
                if not self._queue:
                    return None
                key, text = self._queue.popleft()
                if self._states[key] is State.QUEUED:
                    self._mark(key, State.RUNNING)
                    return key, text

    def _mark(self, key: Key, state: State) -> None:
        """Sets a kernel's state. The caller holds the lock."""
        self._states[key] = state
        self._write_stamp_if_done()
        self._changed.notify_all()

    def _write_stamp_if_done(self) -> None:
        needed = (state for key, state in self._states.items() if key not in self._not_needed)
        if self._needed_listed and self._is_complete and all(state is State.ENDED for state in needed):
            with suppress(OSError):  # without a stamp the next start repeats the dry run
                self._stamp.parent.mkdir(parents=True, exist_ok=True)
                self._stamp.touch()

    def _end_worker(self) -> None:
        with self._changed:
            self._num_working -= 1
            is_last = self._num_working == 0
            if is_last:  # no worker is left to wait for
                self._states = dict.fromkeys(self._states, State.ENDED)
                self._needed_listed = self._listed = True
                if self._detach is not None:  # before waiters are notified
                    self._detach()
            self._changed.notify_all()
        if is_last:
            with suppress(OSError):
                if self._process.stdin is not None:
                    self._process.stdin.close()
            self._process.wait()


# ---------------------------------------------------------------------------------------------------------------------
# The process of the dry run. It and its workers end with this process: it reads its stdin to the end, and only this
# process holds the other end.


def _start(module: str, sockets: Sequence[int]) -> subprocess.Popen[str]:
    # The package may be a checkout that is neither installed nor the working directory.
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    secrets = {"HF_TOKEN", *(item.variable for item in knobs().values() if item.secret)}
    env = {name: value for name, value in os.environ.items() if name not in secrets}
    env |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    quiet = os.environ.get("QUIRE_DEBUG", "0") in ("", "0")  # the start meets and reports the same errors
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, sockets)],
        env=env,
        pass_fds=sockets,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.DEVNULL if quiet else None,
    )


def _run_thread(target: Any, *args: Any) -> None:
    def run() -> None:
        # If a process dies or sends invalid lines, the start compiles its kernels itself.
        with suppress(OSError, ValueError, KeyError, TypeError):
            target(*args)

    threading.Thread(target=run, name="quire compilers", daemon=True).start()


def _send_line(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
