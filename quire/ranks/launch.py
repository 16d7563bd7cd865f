"""Starts the ranks of a group on this machine, lets them agree on the cache, and connects an engine to them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.cache.memory import MemoryPlan
from quire.engine.host.step_messages import MARK
from quire.engine.workers import DeviceLost
from quire.parallel.mesh import Mesh
from quire.parallel.shared_memory import GroupMemory, create_group_memory
from quire.parallel.topology import Topology
from quire.ranks import messages
from quire.ranks.group import RankGroup
from quire.ranks.messages import AgreedCache, FromRank, RankFailed, RankLoaded, RankReady, Regroup, StartRank
from quire.ranks.remote_rank import RemoteProcess, connect_rank
from quire.ranks.socket_links import FrameSocket, SocketRankConnection
from quire.types import QuireError

START_SECONDS = 600.0  # deadline of loading the model on all ranks
ANSWER_SECONDS = 10.0  # for a rank to answer that it has joined a rebuilt group; it may be in the middle of a step
END_SECONDS = 2.0  # time in which ranks should end by themselves before they are killed


Process = subprocess.Popen[bytes] | RemoteProcess


@dataclass(slots=True)
class _Rank:
    """One rank's process and its socket."""

    number: int
    stage: int
    index: int  # among the ranks that share its stage's layers
    process: Process
    frames: FrameSocket

    def receive(self, deadline: float) -> FromRank:
        try:
            frame = self.frames.read(deadline)
        except TimeoutError:
            raise QuireError("rank_timeout", f"Rank {self.number} did not start within {START_SECONDS:g} s.") from None
        if frame is None:
            self.process.wait()
            code = self.process.returncode
            raise QuireError("rank_lost", f"Rank {self.number} ended while it started, with exit code {code}.")
        message = messages.decode_from_rank(frame)
        if isinstance(message, RankFailed):
            raise message.error()
        return message


class LocalRanks:
    """The ranks of one group, as processes of this machine. Implements what `RankGroup` needs to close them."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        mesh: Mesh,
        seconds: float,
        keeps_spare: bool = False,
        topology: Topology | None = None,
    ):
        """Starts the processes, which load the model, and waits until all have. `settings`: those of the engine;
        `seconds`: deadline of each operation of the group. `keeps_spare`: a process that has imported torch waits to
        replace a lost rank. `topology`: the machine of each stage; the first is this one."""
        self._topology = topology
        self._generation = 0  # how often the group was rebuilt
        self._agreed = AgreedCache(num_units=[], num_host_units=None)
        self._spare: tuple[subprocess.Popen[bytes], FrameSocket] | None = None
        self._keeps_spare = keeps_spare
        self._settings, self._mesh, self._seconds = dict(settings), mesh, seconds
        self._ranks: list[_Rank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="quire-ranks-")  # of this user only; holds the pipes' sockets
        self._secret = os.urandom(32) if topology is None else topology.secret
        self._memories: list[GroupMemory] = []
        paths = self._make_memories()
        try:
            self._ranks = [_Rank(number, *mesh.place(number), *self._spawn(number)) for number in range(mesh.size)]
            for rank in self._ranks:
                rank.frames.write(messages.encode(self._start_message(rank, paths)))
            deadline = time.monotonic() + START_SECONDS
            self.loaded = [_expect(rank.receive(deadline), RankLoaded) for rank in self._ranks]
            self._check_digests()
        except BaseException:
            self.close()
            raise
        finally:
            for path in paths:
                path.unlink()

    def _make_memories(self) -> list[Path]:
        """Makes and maps the memory of each stage of this machine."""
        paths = [create_group_memory(self._mesh.tp) for _ in range(self._mesh.pp if self._topology is None else 1)]
        self._memories = [GroupMemory(path) for path in paths]
        return paths

    def _check_digests(self) -> None:
        for rank, loaded in zip(self._ranks, self.loaded, strict=True):
            if loaded.digest != self.loaded[0].digest:
                what = f"Rank {rank.number} has other model files or another version of Quire than rank 0."
                raise QuireError("rank_mismatch", what, "Install the same ones on all nodes.")

    def _spawn(self, number: int) -> tuple[Process, FrameSocket]:
        stage = self._mesh.place(number)[0]
        if self._topology is None or stage == 0:
            return _spawn()
        raw = connect_rank(self._topology.nodes[stage], self._secret)
        return RemoteProcess(raw), FrameSocket(raw)

    def _start_message(self, rank: _Rank, paths: Sequence[Path]) -> StartRank:
        pipes = {stage: self._addresses(stage, rank.index) for stage in range(self._mesh.pp)}
        return StartRank(
            settings=self._settings,
            rank=rank.index,
            size=self._mesh.tp,
            memory=_path_of(rank, paths),
            seconds=self._seconds,
            stage=rank.stage,
            stages=self._mesh.pp,
            generation=self._generation,
            num_ranks=self._mesh.size,
            pipes=pipes if self._mesh.pp > 1 else {},
            secret=self._secret,
        )

    def _addresses(self, stage: int, index: int) -> list[str]:
        if self._topology is not None:
            return self._topology.nodes[stage].pipes
        return [f"unix:{self._folder.name}/{self._mesh.rank(stage, index)}"]

    def agree(self) -> MemoryPlan:
        """Lets all ranks allocate a cache of as many units as fit on each, and returns the first rank's plan of it."""
        plans = [loaded.memory for loaded in self.loaded]
        units = [min(counts) for counts in zip(*(plan.num_units for plan in plans), strict=True)]
        host = None
        if all(plan.num_host_units is not None for plan in plans):
            host = [min(counts) for counts in zip(*(plan.num_host_units or () for plan in plans), strict=True)]
        deadline = time.monotonic() + START_SECONDS
        self._agreed = AgreedCache(num_units=units, num_host_units=host)
        for rank in self._ranks:
            rank.frames.write(messages.encode(self._agreed))
        for rank in self._ranks:
            _expect(rank.receive(deadline), RankReady)
        capacity = min(plan.capacity_tokens for plan in plans)
        host_units = None if host is None else tuple(host)
        plan: MemoryPlan = plans[0]
        return replace(plan, num_units=tuple(units), num_host_units=host_units, capacity_tokens=capacity)

    def group(self) -> RankGroup:
        """Returns the workers that send plans to these ranks."""
        self._start_spare()
        answering = self._mesh.answering
        return RankGroup(self._connections(), answering, on_close=self.close, regroup=self._regroup)

    def _connections(self) -> list[SocketRankConnection]:
        return [
            SocketRankConnection(rank.number, rank.frames, self._seconds + 1, self._describe, self._look)
            for rank in self._ranks
        ]

    def _regroup(self) -> list[SocketRankConnection]:
        """Replaces ranks that have ended, are stopped or do not answer. The others keep their weights."""
        self._generation += 1
        for memory in self._memories:
            for index in range(self._mesh.tp):
                memory.end(index)  # ends the waits of other ranks for this one
        paths = self._make_memories()
        try:
            told = [rank for rank in self._ranks if self._tell(rank, _path_of(rank, paths))]
            started = [self._replace(rank, paths) for rank in self._ranks if rank not in told]
            deadline = time.monotonic() + min(self._seconds, ANSWER_SECONDS)
            silent = [rank for rank in told if not _is_ready(rank, deadline)]
            started += [self._replace(rank, paths) for rank in silent]
            deadline = time.monotonic() + START_SECONDS
            for rank in started:
                _expect(rank.receive(deadline), RankLoaded)
                rank.frames.write(messages.encode(self._agreed))
            for rank in started:
                _expect(rank.receive(deadline), RankReady)
        finally:
            for path in paths:
                path.unlink()
        self._start_spare()
        return self._connections()

    def _tell(self, rank: _Rank, memory: str) -> bool:
        """Tells a rank that the group is rebuilt. False: it has ended or is stopped."""
        if rank.process.poll() is not None or is_stopped(rank.process.pid):
            return False
        try:
            rank.frames.write(messages.encode(Regroup(generation=self._generation, memory=memory)))
        except OSError:
            return False
        return True

    def _replace(self, lost: _Rank, paths: Sequence[Path]) -> _Rank:
        """Ends a rank and starts another in its place, which loads its weights meanwhile."""
        lost.process.kill()
        lost.process.wait()
        lost.frames.close()
        spare: tuple[Process, FrameSocket] | None = None
        if self._topology is None or lost.stage == 0:
            spare, self._spare = self._spare, None
        if spare is not None and spare[0].poll() is not None:
            spare = None
        rank = _Rank(lost.number, lost.stage, lost.index, *(spare or self._spawn(lost.number)))
        self._ranks[rank.number] = rank
        rank.frames.write(messages.encode(self._start_message(rank, paths)))
        return rank

    def _start_spare(self) -> None:
        if self._keeps_spare and self._spare is None:
            self._spare = _spawn(is_spare=True)

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def close(self) -> None:
        """Ends the ranks: by closing their sockets, or by force if they do not end in time."""
        if self._spare is not None:
            process, frames = self._spare
            process.kill()
            process.wait()
            frames.close()
            self._spare = None
        for rank in self._ranks:
            rank.frames.close()
        deadline = time.monotonic() + END_SECONDS
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            if rank.process.poll() is None:
                rank.process.kill()
                rank.process.wait()
        self._folder.cleanup()

    def _look(self) -> None:
        """Raises `DeviceLost` if a rank has ended or its process is stopped."""
        for rank in self._ranks:
            if rank.process.poll() is not None:
                code = rank.process.returncode
                raise DeviceLost(f"Rank {rank.number} has ended with exit code {code} {self._describe(rank.number)}")
            if is_stopped(rank.process.pid):
                raise DeviceLost(f"The process of rank {rank.number} is stopped {self._describe(rank.number)}")

    def _describe(self, number: int) -> str:
        """Returns where a rank is and which ranks are alive, as the end of a sentence."""
        rank = self._ranks[number]
        if rank.stage >= len(self._memories):
            return "(on another machine)"
        place = self._memories[rank.stage].position(rank.index)
        dead = [str(rank.number) for rank in self._ranks if rank.process.poll() is not None]
        others = f"; ended: rank {', '.join(dead)}" if dead else ""
        return f"(step {place.step}, operation {place.joined}{others})"


def is_stopped(pid: int) -> bool:
    """Returns whether a process is stopped, by a signal or a debugger."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # no such file system, or no such process any more
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


def _spawn(*, is_spare: bool = False) -> tuple[subprocess.Popen[bytes], FrameSocket]:
    """Starts the process of a rank, which waits for its start message."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "quire.startup.rank_process", str(theirs.fileno())]
        command += ["spare"] if is_spare else []
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()], env=environment
        )
    return process, FrameSocket(ours)


def _path_of(rank: _Rank, paths: Sequence[Path]) -> str:
    """Returns the path of the memory of a rank's stage; empty on another machine."""
    return str(paths[rank.stage]) if rank.stage < len(paths) else ""


def _is_ready(rank: _Rank, deadline: float) -> bool:
    """Returns whether a rank says that it has joined the rebuilt group. What it sent before is skipped."""
    try:
        while (frame := rank.frames.read(deadline)) is not None:
            if not frame.startswith(MARK) and isinstance(messages.decode_from_rank(frame), RankReady):
                return True
    except (TimeoutError, OSError):
        return False
    return False


def _expect(message: FromRank, kind: type[Any]) -> Any:
    if not isinstance(message, kind):
        raise QuireError("bad_message", f"A rank sent {type(message).__name__} instead of {kind.__name__}.")
    return message
