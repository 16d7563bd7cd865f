"""Workers that get nothing but bytes: what proves that a plan is all they need to know.

`RemoteWorkers` stands between an engine and its workers. Each plan, each step's masks and each output crosses it as a
frame, and the other side works on what it decoded. What works only because both sides share an object fails here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quire.engine.host.step_messages import StepMasks, StepWriter, engine_reader, workers_reader
from quire.engine.workers import Ticket, Workers
from quire.types import Plan, StepOutput


class RemoteWorkers:
    """Implements `Workers` by sending every message to the real ones as bytes, and their outputs back."""

    def __init__(self, workers: Workers):
        self._workers = workers
        self._to_workers, self._at_workers = StepWriter(), workers_reader()
        self._to_engine, self._at_engine = StepWriter(), engine_reader()
        self.plan_bytes: list[int] = []
        self.num_masked = 0

    def forward(self, plan: Plan) -> RemoteForward:
        frame = self._to_workers.write(plan)
        self.plan_bytes.append(len(frame))
        came = self._at_workers.read(frame)
        assert isinstance(came, Plan) and came is not plan
        return RemoteForward(came.step, self._workers.forward(came))

    def sample(self, forward: RemoteForward, masks: Mapping[int, bytes] | None = None) -> RemoteTicket:
        if masks is not None:
            came = self._at_workers.read(self._to_workers.write(StepMasks(forward.step, dict(masks))))
            assert isinstance(came, StepMasks) and came.step == forward.step
            masks = came.masks
            self.num_masked += bool(masks)
        return RemoteTicket(self, self._workers.sample(forward.forward, masks))

    def bring_back(self, output: StepOutput) -> StepOutput:
        return self._at_engine.read(self._to_engine.write(output))

    def warm_ups(self) -> Iterator[None]:
        return self._workers.warm_ups()

    def close(self) -> None:
        self._workers.close()


@dataclass(slots=True)
class RemoteForward:
    step: int
    forward: Any


@dataclass(slots=True)
class RemoteTicket:
    workers: RemoteWorkers
    ticket: Ticket

    def wait(self) -> StepOutput:
        return self.workers.bring_back(self.ticket.wait())
