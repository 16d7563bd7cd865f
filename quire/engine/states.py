"""Small explicit state machines: named states, named transitions, each counted, remembered and told to who listens.

The engine's loop has one (what it is doing), the supervisor has one (how the engine process fares). A move that the
table does not allow is a bug and says so; nothing changes a state in any other way.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

S = TypeVar("S", bound=Enum)

KEPT = 64  # moves remembered, for operators to read


@dataclass(frozen=True, slots=True)
class Move:
    name: str
    source: str
    target: str
    at: float  # Unix seconds
    why: str = ""


@dataclass(frozen=True, slots=True)
class Transition(Generic[S]):
    sources: frozenset[S]
    target: S


class StateMachine(Generic[S]):
    def __init__(
        self,
        initial: S,
        transitions: Mapping[str, Transition[S]],
        *,
        on_move: Callable[[Move], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`on_move`: told of every move; a machine that moves thousands of times a second has none and only counts."""
        self.state = initial
        self.counts = dict.fromkeys(transitions, 0)
        self.history: deque[Move] = deque(maxlen=KEPT)
        self._transitions = transitions
        self._on_move = on_move
        self._clock = clock
        self.since = clock()

    def move(self, name: str, why: str = "") -> None:
        transition = self._transitions[name]
        source = self.state
        if source not in transition.sources:
            raise AssertionError(f"no transition {name!r} from {source.value!r}")
        self.state = transition.target
        self.counts[name] += 1
        if self._on_move is not None:
            self.since = self._clock()
            move = Move(name, source.value, transition.target.value, time.time(), why)
            self.history.append(move)
            self._on_move(move)

    def age(self) -> float:
        """Seconds since the last move that was told."""
        return self._clock() - self.since


# ---------------------------------------------------------------------------------------------------------------------
# What the engine's loop does


class LoopState(Enum):
    IDLE = "idle"
    SCHEDULING = "scheduling"
    WAITING_WORKER = "waiting_worker"
    ERROR = "error"


LOOP_TRANSITIONS: dict[str, Transition[LoopState]] = {
    "turn": Transition(frozenset({LoopState.IDLE}), LoopState.SCHEDULING),
    "wait": Transition(frozenset({LoopState.SCHEDULING}), LoopState.WAITING_WORKER),
    "commit": Transition(frozenset({LoopState.WAITING_WORKER}), LoopState.SCHEDULING),
    "rest": Transition(frozenset({LoopState.SCHEDULING}), LoopState.IDLE),
    "fail": Transition(frozenset({LoopState.SCHEDULING, LoopState.WAITING_WORKER}), LoopState.ERROR),
    "rolled_back": Transition(frozenset({LoopState.ERROR}), LoopState.IDLE),
    "rebuilt": Transition(frozenset(LoopState), LoopState.IDLE),
}

# ---------------------------------------------------------------------------------------------------------------------
# How the engine process fares


class ProcessState(Enum):
    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing_off"  # it died; a moment's wait before the next start
    RESTARTING = "restarting"
    FAILED = "failed"  # the budget of restarts is spent, or the next start makes no sense
    STOPPED = "stopped"


_P = ProcessState
PROCESS_TRANSITIONS: dict[str, Transition[ProcessState]] = {
    "started": Transition(frozenset({_P.STARTING}), _P.READY),
    "lost": Transition(frozenset({_P.READY}), _P.BACKING_OFF),
    "retry": Transition(frozenset({_P.BACKING_OFF}), _P.RESTARTING),
    "recovered": Transition(frozenset({_P.RESTARTING}), _P.READY),
    "died_again": Transition(frozenset({_P.RESTARTING}), _P.BACKING_OFF),
    "gave_up": Transition(frozenset({_P.STARTING, _P.READY, _P.BACKING_OFF, _P.RESTARTING}), _P.FAILED),
    "stopped": Transition(frozenset(_P) - {_P.STOPPED}, _P.STOPPED),
}
