"""`RankGroup`: the engine's `Workers` on a group of ranks. Each plan is serialised once and sent to every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from quire.engine.host.step_messages import StepMasks, StepWriter, engine_reader
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

    def __init__(self, links: Sequence[RankConnection], answering: int, on_close: Callable[[], None] = lambda: None):
        """`links`: one per rank. `answering`: index of the rank that sends outputs. `on_close`: ends the ranks."""
        self._on_close = on_close
        self._links = list(links)
        self._answering = answering
        self._writer, self._reader = StepWriter(), engine_reader()
        self._steps: deque[GroupTicket] = deque()  # sent, in order, whose outputs have not come

    def forward(self, plan: Plan) -> Plan:
        self._send(self._writer.write(plan))
        return plan

    def sample(self, forward: Plan, masks: Mapping[int, bytes] | None = None) -> GroupTicket:
        if forward.may_mask:
            self._send(self._writer.write(StepMasks(forward.step, dict(masks or {}))))
        ticket = GroupTicket(self)
        self._steps.append(ticket)
        return ticket

    def warm_ups(self) -> Iterator[None]:
        yield from ()

    def close(self) -> None:
        for link in self._links:
            link.close()
        self._on_close()

    def receive(self, ticket: GroupTicket) -> StepOutput:
        """Returns a step's output. Outputs come in the order of the steps."""
        while ticket.output is None:
            self._steps.popleft().output = self._reader.read(self._links[self._answering].read())
        return ticket.output

    def _send(self, frame: bytes) -> None:
        for link in self._links:
            link.write(frame)


class GroupTicket:
    """A step of a group in flight. Implements `Ticket`."""

    def __init__(self, group: RankGroup):
        self._group = group
        self.output: StepOutput | None = None

    def wait(self) -> StepOutput:
        return self._group.receive(self)
