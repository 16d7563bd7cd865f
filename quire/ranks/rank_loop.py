"""The loop of one rank: it reads plans and masks from its link and executes them in order. The rank that samples also
sends the outputs. A rank decides nothing.

A rank that fails sends a `RankFailure` and ends, because its place in the group's sequence of collectives is lost.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.engine.host.step_messages import StepMasks, StepWriter, workers_reader
from quire.engine.workers import Workers
from quire.runtime.stage_runner import StageInput, StageRunner
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
    seconds: float  # of the forward pass, without waiting for another stage


@dataclass(slots=True)
class RankLoop:
    """Executes the plans of an engine on one rank."""

    workers: Workers  # the workers of this rank alone
    link: RankLink
    answers: bool  # whether this rank's outputs are the group's
    on_step: Callable[[int], None] = lambda step: None  # called with the number of each step before it runs
    stage: StageInput | None = None  # where the stream comes from, on the last stage of a pipeline
    _unsampled: deque[_Forwarded] = field(default_factory=deque)  # forward passes whose masks have not come

    def run(self) -> None:
        """Runs until the link ends."""
        reader, writer = workers_reader(), StepWriter()
        while (frame := self.link.read()) is not None:
            message = reader.read(frame)
            if isinstance(message, Plan):
                self.on_step(message.step)
                self._unsampled.append(self._forward(message))
                if message.may_mask:
                    continue
                masks = None
            else:
                assert isinstance(message, StepMasks)
                masks = message.masks
            step = self._unsampled.popleft()
            before = time.perf_counter()
            output = self.workers.sample(step.forward, masks).wait()
            if self.stage is not None and step.plan.rows:
                output.busy = self.stage.times(step.seconds + time.perf_counter() - before).tolist()
            if self.answers:
                self.link.write(writer.write(output))

    def _forward(self, plan: Plan) -> _Forwarded:
        before = time.perf_counter()
        forward = self.workers.forward(plan)
        seconds = time.perf_counter() - before
        if self.stage is not None and plan.rows:
            seconds -= self.stage.waited
        return _Forwarded(plan, forward, seconds)


@dataclass(slots=True)
class StageLoop:
    """Executes the plans of an engine on a pipeline stage before the last, which answers nothing."""

    runner: StageRunner
    link: RankLink
    on_step: Callable[[int], None] = lambda step: None

    def run(self) -> None:
        """Runs until the link ends."""
        reader = workers_reader()
        while (frame := self.link.read()) is not None:
            message = reader.read(frame)
            if isinstance(message, Plan):  # masks are for the last stage
                self.on_step(message.step)
                self.runner.run(message)
