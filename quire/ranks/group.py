"""`RankGroup`: the engine's `Workers` on a group of ranks. Each plan is serialised once and sent to every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.engine.host.step_messages import StepMasks, StepWriter, engine_reader
from quire.engine.workers import DeviceLost, RanksLost
from quire.types import Plan, StepOutput


class RankConnection(Protocol):
    """The engine's connection to one rank."""

    def write(self, frame: bytes) -> None: ...

    def read(self) -> bytes:
        """Returns the next frame. Raises `DeviceLost` if the rank has ended or does not answer in time."""
        ...

    def close(self) -> None: ...


class RankGroup:
    """Implements `Workers`."""

    def __init__(
        self,
        links: Sequence[RankConnection],
        answering: int,
        on_close: Callable[[], None] = lambda: None,
        regroup: Callable[[], Sequence[RankConnection]] | None = None,
    ):
        """`links`: one per rank. `answering`: index of the rank that sends outputs. `on_close`: ends the ranks.
        `regroup`: replaces the lost ranks and returns the new links."""
        self._on_close = on_close
        self._replace = regroup
        self._links = list(links)
        self._answering = answering
        self._writer, self._reader = StepWriter(), engine_reader()
        self._steps: deque[GroupTicket] = deque()  # sent, in order, whose outputs have not come

    def forward(self, plan: Plan) -> SentPlan:
        self._send(self._writer.write(plan))
        return SentPlan(plan)

    def sample(self, forward: SentPlan, masks: Mapping[int, bytes] | None = None) -> GroupTicket:
        plan = forward.plan
        if plan.may_mask:
            self._send(self._writer.write(StepMasks(plan.step, dict(masks or {}))))
        ticket = GroupTicket(self, plan.step)
        self._steps.append(ticket)
        return ticket

    def warm_ups(self) -> Iterator[None]:
        yield from ()

    def close(self) -> None:
        for link in self._links:
            link.close()
        self._on_close()

    def receive(self, ticket: GroupTicket) -> StepOutput:
        """Returns a step's output. Outputs come in the order of the steps; those of steps that failed before they were
        sampled, for which there is no ticket, are skipped."""
        while ticket.output is None:
            try:
                frame = self._links[self._answering].read()
            except DeviceLost as error:
                raise self._lost(error) from error
            output = self._reader.read(frame)
            if self._steps and self._steps[0].step == output.step:
                self._steps.popleft().output = output
        return ticket.output

    def _send(self, frame: bytes) -> None:
        try:
            for link in self._links:
                link.write(frame)
        except DeviceLost as error:
            raise self._lost(error) from error

    def _lost(self, error: DeviceLost) -> DeviceLost:
        return error if self._replace is None else RanksLost(error.what, self._regroup)

    def _regroup(self) -> None:
        """Replaces the lost ranks. The steps in flight are lost."""
        assert self._replace is not None
        self._links = list(self._replace())
        self._writer, self._reader = StepWriter(), engine_reader()
        self._steps.clear()


@dataclass(frozen=True, slots=True)
class SentPlan:
    """A step whose forward pass the ranks run."""

    plan: Plan


class GroupTicket:
    """A step of a group in flight. Implements `Ticket`."""

    def __init__(self, group: RankGroup, step: int):
        self._group = group
        self.step = step
        self.output: StepOutput | None = None

    def wait(self) -> StepOutput:
        return self._group.receive(self)
