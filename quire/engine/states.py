"""State machines with named transitions, which are counted, recorded and passed to a callback.

The engine's loop has one for what it is doing, the supervisor one for the engine process. A transition that the table
does not allow raises an AssertionError. States change in no other way.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

S = TypeVar("S", bound=Enum)

KEPT = 64  # number of recent moves that operators can read


@dataclass(frozen=True, slots=True)
class Move:
    """One transition that was made."""

    name: str
    source: str
    target: str
    at: float  # Unix seconds
    why: str = ""


@dataclass(frozen=True, slots=True)
class Transition(Generic[S]):
    """A named transition: the states it may start from, and the state it leads to."""

    sources: frozenset[S]
    target: S


class StateMachine(Generic[S]):
    """A state that changes by the transitions of a table only."""

    def __init__(
        self,
        initial: S,
        transitions: Mapping[str, Transition[S]],
        *,
        on_move: Callable[[Move], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`on_move` is called with every move. Without it moves are only counted, which suits a loop's rate."""
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
        """Return the seconds since the last recorded move."""
        return self._clock() - self.since


# ---------------------------------------------------------------------------------------------------------------------
# States of the engine's loop


class LoopState(Enum):
    """The states of the engine's loop."""

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
# States of the engine process


class ProcessState(Enum):
    """The states of the engine process."""

    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing_off"  # the process exited; waits before the next start
    RESTARTING = "restarting"
    FAILED = "failed"  # the budget of restarts is spent, or a restart cannot help
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
