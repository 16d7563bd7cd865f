"""Runs the plans of an engine on a pipeline stage before the last, which computes layers and samples nothing.

The tokens that the last stage samples are written to this stage's rows when a plan needs them, so a stage begins with
the next rows while later stages still compute the ones before.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.models.model import Model
from quire.parallel.pipes import Pipe
from quire.runtime.rows import DeviceRows
from quire.runtime.samples import StepSamples
from quire.runtime.store import CacheStore
from quire.types import Plan

BAD = -1  # stands for the token of a sample that can't be drawn


@dataclass(slots=True)
class StageInput:
    """What comes from the stage before: the residual stream, and how long each stage before has computed."""

    pipe: Pipe
    waited: float = 0.0  # seconds in the last step
    busy: Tensor | None = None  # [stages before] float64: seconds that each computed in the last step

    def __call__(self) -> Tensor | None:
        """Returns the stream of the next step, [tokens, width]; None on the first stage."""
        if self.pipe.stage == 0:
            return None
        before = time.perf_counter()
        stream = self.pipe.receive(self.pipe.stage - 1)
        self.busy = self.pipe.receive(self.pipe.stage - 1)
        self.waited = time.perf_counter() - before
        return stream

    def send_tokens(self, tokens: Tensor) -> None:
        """Sends what the last stage sampled to all stages before it. tokens [samples] int64, or BAD."""
        if len(tokens):
            for stage in range(self.pipe.count - 1):
                self.pipe.send(tokens, stage)

    def times(self, busy: float) -> Tensor:
        """Returns the times of the last step up to this stage, which was `busy` for so many seconds."""
        own = torch.tensor([busy], dtype=torch.float64)
        return own if self.busy is None else torch.cat([self.busy, own])


class StageRunner:
    """Computes this stage's layers and sends their output to the next stage."""

    def __init__(self, model: Model, store: CacheStore, rows: DeviceRows, pipe: Pipe):
        self._model = model
        self._store = store
        self._rows = rows
        self._pipe = pipe
        self._input = StageInput(pipe)
        self._unsettled: deque[Plan] = deque()  # steps whose sampled tokens are not in the rows yet

    @torch.inference_mode()
    def run(self, plan: Plan) -> None:
        self._settle_for(plan)
        self._store.apply(plan.copies)
        self._rows.apply(plan, {})
        if not plan.rows:
            return
        step = self._rows.gather(plan).step
        self._input.waited = 0.0
        before = time.perf_counter()
        step.stream = self._input()
        stream = self._model.forward(step, self._store.tensors)  # [tokens, width]
        self._store.apply(plan.snapshots)
        busy = time.perf_counter() - before - self._input.waited
        self._pipe.send(stream, self._pipe.stage + 1)
        self._pipe.send(self._input.times(busy), self._pipe.stage + 1)
        if any(row.wants_sample for row in plan.rows):
            self._unsettled.append(plan)

    def forget(self) -> None:
        """Forgets steps that will not be done, since the group has lost a rank."""
        self._unsettled.clear()

    def _settle_for(self, plan: Plan) -> None:
        """Writes the sampled tokens that this plan reads, and those of all steps that must be done by now."""
        touched = {row.row for row in plan.rows} | {init.row for init in plan.added}
        num_needed = len(self._unsettled) - self._pipe.count  # of the oldest, which have left the last stage
        for index, old in enumerate(self._unsettled):
            if any(row.wants_sample and row.row in touched for row in old.rows):
                num_needed = max(num_needed, index + 1)
        for _ in range(num_needed):
            self._settle(self._unsettled.popleft())

    def _settle(self, plan: Plan) -> None:
        found = self._pipe.receive(self._pipe.count - 1)  # [samples] int64
        bad = found == BAD
        samples = StepSamples.of(plan)
        rows = torch.tensor(samples.rows, dtype=torch.int64, device=self._rows.device)
        lengths = samples.lengths(self._rows.computed[rows])
        tokens = found.masked_fill(bad, 0)
        self._rows.append(rows, lengths, tokens)
        samples.settle(self._rows, tokens, bad, lengths)
