"""The loop of one rank: it reads plans and masks from its link and executes them in order. The rank that samples also
sends the outputs. A rank decides nothing.

A rank that fails sends a `RankFailed` and ends, because its place in the group's sequence of collectives is lost. One
that waits for a rank in vain keeps its weights, and goes on once the engine has rebuilt the group.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from quire.engine.host.step_messages import MARK, StepMasks, StepReader, StepWriter, workers_reader
from quire.engine.workers import Workers
from quire.parallel import RankTimeout
from quire.parallel.pipes import PipeTimeout
from quire.ranks.messages import RankFailed, encode
from quire.runtime.samples import StepSamples
from quire.runtime.stage_runner import BAD, StageInput, StageRunner
from quire.types import Plan, QuireError, StepOutput


class RankLink(Protocol):
    """A rank's connection to its engine."""

    def read(self) -> bytes | None:
        """Returns the next frame; None: the group has ended."""
        ...

    def write(self, frame: bytes) -> None: ...


@dataclass(slots=True)
class StepInbox:
    """The steps that come to a rank, also after its group was rebuilt.

    Once an operation has failed for lack of another rank, what comes is skipped until the engine has rebuilt the group.
    """

    link: RankLink
    on_regroup: Callable[[bytes], None] | None = None  # handles a frame that is no step; None: there are none
    _reader: StepReader[Plan | StepMasks] = field(default_factory=workers_reader)
    _is_lost: bool = False

    def next(self) -> Plan | StepMasks | Rebuilt | None:
        """Returns the next message; None: the group has ended."""
        while (frame := self.link.read()) is not None:
            if not frame.startswith(MARK) and self.on_regroup is not None:
                self.on_regroup(frame)
                self._reader, self._is_lost = workers_reader(), False
                return Rebuilt()
            if not self._is_lost:
                return self._reader.read(frame)
        return None

    def lose(self, error: QuireError) -> None:
        """Skips all steps until the group is rebuilt, and tells the engine why. Raises the error if it can't be."""
        if self.on_regroup is None:
            raise error
        if not self._is_lost:
            self.link.write(encode(RankFailed(code=error.code, what=error.what, hint=error.hint)))
        self._is_lost = True


class Rebuilt:
    """The group has been rebuilt, and its steps are counted anew."""


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
    on_regroup: Callable[[bytes], None] | None = None  # called with the engine's message that the group was rebuilt
    stage: StageInput | None = None  # where the stream comes from, on the last stage of a pipeline
    _unsampled: _Forwarded | None = None  # the forward pass whose masks have not come

    def run(self) -> None:
        """Runs until the link ends."""
        inbox, writer = StepInbox(self.link, self.on_regroup), StepWriter()
        while (message := inbox.next()) is not None:
            if isinstance(message, Rebuilt):
                self._unsampled = None
                writer = StepWriter()
                continue
            try:
                output = self._take(message)
            except (RankTimeout, PipeTimeout) as error:
                inbox.lose(error)
                continue
            if self.answers and output is not None:
                self.link.write(writer.write(output))

    def _take(self, message: Plan | StepMasks) -> StepOutput | None:
        """Returns the output of the step that this message completes; None: its masks are still to come."""
        masks = None
        if isinstance(message, Plan):
            self.on_step(message.step)
            self._drop_unsampled()
            step = self._forward(message)
            if message.may_mask:
                self._unsampled = step
                return None
        else:
            assert self._unsampled is not None and self._unsampled.plan.step == message.step
            masks, step, self._unsampled = message.masks, self._unsampled, None
        before = time.perf_counter()
        output = self.workers.sample(step.forward, masks).wait()
        if self.stage is not None and step.plan.rows:
            output.busy = self.stage.times(step.seconds + time.perf_counter() - before).tolist()
        return output

    def _drop_unsampled(self) -> None:
        """Drops a step whose masks did not come, because the engine failed to fill them. Stages wait for its tokens."""
        if self._unsampled is not None and self.stage is not None:
            self.stage.send_tokens(torch.full((len(StepSamples.of(self._unsampled.plan).rows),), BAD))
        self._unsampled = None

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
    on_regroup: Callable[[bytes], None] | None = None

    def run(self) -> None:
        """Runs until the link ends."""
        inbox = StepInbox(self.link, self.on_regroup)
        while (message := inbox.next()) is not None:
            if isinstance(message, Rebuilt):
                self.runner.forget()
            elif isinstance(message, Plan):  # masks are for the last stage
                self.on_step(message.step)
                try:
                    self.runner.run(message)
                except (RankTimeout, PipeTimeout) as error:
                    inbox.lose(error)
