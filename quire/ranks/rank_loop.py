"""The loop of one rank: it reads plans and masks from its link and executes them in order. The rank that samples also
sends the outputs. A rank decides nothing.

A rank that fails sends a `RankFailure` and ends, because its place in the group's sequence of collectives is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.engine.host.step_messages import StepMasks, StepWriter, workers_reader
from quire.engine.workers import Workers
from quire.types import Plan


class RankLink(Protocol):
    """A rank's connection to its engine."""

    def read(self) -> bytes | None:
        """Returns the next frame; None: the group has ended."""
        ...

    def write(self, frame: bytes) -> None: ...


@dataclass(slots=True)
class _Forwarded:
    plan: Plan
    forward: Any


@dataclass(slots=True)
class RankLoop:
    """Executes the plans of an engine on one rank."""

    workers: Workers  # the workers of this rank alone
    link: RankLink
    answers: bool  # whether this rank's outputs are the group's
    on_step: Callable[[int], None] = lambda step: None  # called with the number of each step before it runs
    _unsampled: deque[_Forwarded] = field(default_factory=deque)  # forward passes whose masks have not come

    def run(self) -> None:
        """Runs until the link ends."""
        reader, writer = workers_reader(), StepWriter()
        while (frame := self.link.read()) is not None:
            message = reader.read(frame)
            if isinstance(message, Plan):
                self.on_step(message.step)
                self._unsampled.append(_Forwarded(message, self.workers.forward(message)))
                if message.may_mask:
                    continue
                masks = None
            else:
                assert isinstance(message, StepMasks)
                masks = message.masks
            step = self._unsampled.popleft()
            output = self.workers.sample(step.forward, masks).wait()
            if self.answers:
                self.link.write(writer.write(output))
