"""Compiles the kernels of a start that finds none of them on disk, in processes beside it, while torch is imported and
weights are read. `LLM`, `AsyncLLM` and the engine process start it before they import torch.

One process rehearses the start and tells which kernels it will launch (`rehearsal`); those it has forked before compile
them (`workers`). The start finds each on disk when it comes to it, waits for one that is under way, and compiles one
that nobody has begun itself. Behind those come the kernels of larger steps, which nobody waits for yet. Nothing depends
on any of this: whatever fails here is left to the start.
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

from quire.config import Config
from quire.config_build import engine_settings, knobs
from quire.machine import Machine, installed_version, may_have_gpu, nvidia_card_names, read_machine

FEWEST_CORES = 4
MOST_WORKERS = 12
WORKER_BYTES = 1 << 28  # what a worker and the compilers it runs take of the host's memory
REHEARSAL_BYTES = 1 << 30
# What a start waits in all: for a rehearsal that has not come to the kernel yet, about as quick as itself; and for
# kernels that somebody else compiles.
LIST_PATIENCE_SECONDS = 3.0
PATIENCE_SECONDS = 60.0
ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "quire/kernels/triton"
OTHER_SETTINGS = ("hub_token", "offline", "trace")  # whatever they say, the kernels are the same
NEEDED = "needed"  # what the rehearsal says when it has told of all that the start needs before its first token
END = "end"  # its last line

Key = tuple[str, str, str]  # of a kernel: its module, its name, what it is compiled for


class State(Enum):
    QUEUED = 1
    RUNNING = 2
    ENDED = 3  # it lies on disk, or nobody tries any more


def start_compilers(config: Config) -> Compilers | None:
    """None where there is nothing to gain: no GPU, too few cores, or all of this has been compiled before."""
    if config.engine.device == "cpu" or config.engine.kernels == "torch" or not may_have_gpu():
        return None
    with suppress(OSError):
        num_workers, stamp = count_workers(read_machine()), stamp_path(config, nvidia_card_names())
        if num_workers > 0 and find_spec("triton") and not stamp.exists() and _may_create(stamp):
            return Compilers(rehearsal_settings(config), num_workers, stamp)
    return None


def rehearsal_settings(config: Config) -> dict[str, Any]:
    """All that may decide which kernels are launched, and how."""
    return {name: value for name, value in engine_settings(config).items() if name not in OTHER_SETTINGS}


def count_workers(machine: Machine) -> int:
    """The start itself and the rehearsal have a core each."""
    if machine.num_usable_cores < FEWEST_CORES:
        return 0
    most = min(MOST_WORKERS, machine.num_usable_cores - 2)
    if machine.memory_available is None:
        return most
    spare = machine.memory_available // 2 - REHEARSAL_BYTES  # the start needs its share, too
    return max(0, min(most, spare // WORKER_BYTES))


def stamp_path(config: Config, cards: tuple[str, ...]) -> Path:
    """The file that says: a start such as this one has left its kernels here. It lies in Triton's cache, and goes when
    that goes."""
    versions = [sys.version, *(installed_version(name) for name in ("torch", "triton"))]
    sources = [(str(path.relative_to(SOURCES)), path.stat().st_mtime_ns) for path in list_sources(SOURCES)]
    text = json.dumps([rehearsal_settings(config), versions, sources, cards], sort_keys=True, default=str)
    return kernel_folder() / hashlib.sha256(text.encode()).hexdigest()[:32]


def list_sources(place: Path) -> list[Path]:
    """Every Python file of a module or package, subfolders included. A place that is missing is a programming error: a
    stamp that does not depend on its sources would outlast their changes."""
    paths = [place] if place.is_file() else sorted(place.rglob("*.py"))
    if not paths:
        raise RuntimeError(f"{place} holds no Python source. Update the list of sources that names it.")
    return paths


def kernel_folder() -> Path:
    """Ours, within Triton's cache of compiled kernels."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    folder = os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")
    return Path(folder, "quire")


def _may_create(stamp: Path) -> bool:
    """Where nothing can be kept, there is no point in compiling for others."""
    existing = next(folder for folder in stamp.parents if folder.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


@dataclass(slots=True)
class _Patience:
    left: float  # seconds

    def wait_for(self, condition: threading.Condition, predicate: Callable[[], bool]) -> None:
        start = time.monotonic()
        condition.wait_for(predicate, self.left)
        self.left = max(0.0, self.left - (time.monotonic() - start))


class Compilers:
    def __init__(
        self, settings: dict[str, Any], num_workers: int, stamp: Path, *, rehearsal: str = "quire.startup.dry_run"
    ):
        """`rehearsal`: the module that is run, with a socket for each of the workers it is to fork."""
        self._stamp = stamp
        self._changed = threading.Condition()
        self._states: dict[Key, State] = {}
        self._queue: deque[tuple[Key, str]] = deque()  # kernels, and the line that asks for each
        self._later: set[Key] = set()  # of them: what no first token needs
        self._needed_listed = False  # no more will come that one does
        self._listed = False  # no more will come
        self._is_whole = True  # nobody was lost on the way
        self._num_working = num_workers
        self._num_idle = 0  # of them: those that wait for a kernel
        self._list_patience, self._patience = _Patience(LIST_PATIENCE_SECONDS), _Patience(PATIENCE_SECONDS)
        self._detach: Callable[[], None] | None = None
        lines = [socket.socketpair() for _ in range(num_workers)]
        self._process = _start(rehearsal, [theirs.fileno() for _, theirs in lines])
        _run_thread(self._list_kernels, settings)
        for ours, theirs in lines:
            theirs.close()
            _run_thread(self._feed, ours)

    def attach(self) -> None:
        """From now on, and for as long as there are any workers, whoever is about to compile one of these kernels in
        this process waits for it instead. Called where Triton is imported anyway."""
        try:
            from triton import knobs

            before = knobs.runtime.jit_cache_hook
        except (ImportError, AttributeError):  # a version without: all is compiled here, as ever
            return

        def hook(**told: Any) -> Any:
            with suppress(ImportError, AttributeError):  # needed next, half a second, once: better before the wait
                import_module("triton.runtime.cache").triton_key()
            with suppress(KeyError, AttributeError):
                self.settle((told["fn"].module, told["fn"].name, told["compile"]["specialization_data"]))
            return before(**told) if before is not None else False  # go on: what was compiled is found on disk

        def detach() -> None:
            if knobs.runtime.jit_cache_hook is hook:
                knobs.runtime.jit_cache_hook = before

        with self._changed:
            if self._num_working > 0:
                knobs.runtime.jit_cache_hook, self._detach = hook, detach

    def settle(self, key: Key) -> None:
        """Returns when this kernel is compiled, or when the caller should do it."""
        with self._changed:
            self._list_patience.wait_for(self._changed, lambda: key in self._states or self._needed_listed)
            self._patience.wait_for(self._changed, lambda: self._is_settled(key) or self._is_stuck(key))
            if self._is_stuck(key):
                self._mark(key, State.ENDED)  # quicker than waiting for its turn

    def _is_settled(self, key: Key) -> bool:
        return self._states.get(key, State.ENDED) is State.ENDED

    def _is_stuck(self, key: Key) -> bool:
        """Nobody has begun it, nor will soon."""
        return self._states.get(key) is State.QUEUED and self._num_idle == 0

    def wait(self) -> None:
        """Until all of it is done; for tests and measurements."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_working == 0)
        self._process.wait()

    # -- in threads of their own ------------------------------------------------------------------------------------

    def _list_kernels(self, settings: dict[str, Any]) -> None:
        told, said_end = self._process.stdout, False
        assert told is not None
        try:
            _say(self._process, json.dumps(settings | {"offline": True}))
            for line in told:
                if said_end := line.strip() == END:
                    break
                if line.strip() == NEEDED:
                    self._end_list()
                else:
                    self._queue_kernel(json.loads(line), line.strip())
        finally:
            told.close()
            with self._changed:
                self._listed = True
                self._end_list(said_end or self._needed_listed)

    def _queue_kernel(self, kernel: dict[str, str], line: str) -> None:
        key = (kernel["module"], kernel["name"], kernel["data"])
        with self._changed:
            if key not in self._states:
                self._queue.append((key, line))
                if self._needed_listed:
                    self._later.add(key)
                self._mark(key, State.QUEUED)

    def _end_list(self, is_whole: bool = True) -> None:
        """Of what is needed, at the latest."""
        with self._changed:
            self._needed_listed = True
            self._is_whole &= is_whole
            self._leave_stamp()
            self._changed.notify_all()

    def _feed(self, line: socket.socket) -> None:
        """One of the workers, for as long as it answers."""
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
                            self._is_whole &= answered
                            self._mark(key, State.ENDED)
                    if not answered:
                        break
        finally:
            self._end_worker()

    def _next(self) -> tuple[Key, str] | None:
        """The next kernel that nobody has begun; None: there will be none any more."""
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
        """With the lock held."""
        self._states[key] = state
        self._leave_stamp()
        self._changed.notify_all()

    def _leave_stamp(self) -> None:
        needed = (state for key, state in self._states.items() if key not in self._later)
        if self._needed_listed and self._is_whole and all(state is State.ENDED for state in needed):
            with suppress(OSError):  # the next start rehearses again
                self._stamp.parent.mkdir(parents=True, exist_ok=True)
                self._stamp.touch()

    def _end_worker(self) -> None:
        with self._changed:
            self._num_working -= 1
            is_last = self._num_working == 0
            if is_last:  # nobody is left to wait for
                self._states = dict.fromkeys(self._states, State.ENDED)
                self._needed_listed = self._listed = True
                if self._detach is not None:  # before anybody hears that all is over
                    self._detach()
            self._changed.notify_all()
        if is_last:
            with suppress(OSError):
                if self._process.stdin is not None:
                    self._process.stdin.close()
            self._process.wait()


# ---------------------------------------------------------------------------------------------------------------------
# The process. It and those it forks live no longer than we: it reads to the end of its stdin, whose other end is ours
# alone.


def _start(module: str, sockets: Sequence[int]) -> subprocess.Popen[str]:
    # A checkout need not be installed, nor be where we are.
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    secrets = {"HF_TOKEN", *(item.variable for item in knobs().values() if item.secret)}
    env = {name: value for name, value in os.environ.items() if name not in secrets}
    env |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    quiet = os.environ.get("QUIRE_DEBUG", "0") in ("", "0")  # what goes wrong here, the start itself will see and say
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
        # A process that died, or something else than it should say: its share is left to the start itself.
        with suppress(OSError, ValueError, KeyError, TypeError):
            target(*args)

    threading.Thread(target=run, name="quire compilers", daemon=True).start()


def _say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
