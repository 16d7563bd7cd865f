"""CUDA graphs of steps that verify drafts: every row computes one token and its drafts, and samples all of them.

Such a step is computed as a decode step in which a row with k drafts occurs 1 + k times, each time one token further.
All tokens write to the cache before any attends, and each attends up to its own position, so the numbers are those of
decode steps. A graph is padded to a number of tokens, so it serves any rows and any numbers of drafts. Sampling and
acceptance follow the graph. Steps that also compute prompts are in `mixed_graphs`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.upload import Arrays, UploadBuffer
from quire.kernels.validation.failures import reason
from quire.models.model import Model
from quire.runtime.graphs import MIN_USES, CapturePool, capture_graph
from quire.runtime.rows import DeviceRows
from quire.types import Plan
from quire.types.bounds import MAX_DRAFTS

MIN_TOKENS = 128  # minimum number of tokens of the largest graph, however few rows there are


@dataclass(slots=True)
class Verified:
    """The outputs of a step with drafts."""

    rows: Tensor  # [samples] int64: device row of each sample; each token is one
    logits: Tensor  # [samples, vocab]
    hidden: Tensor  # [samples, width]


@dataclass(slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    logits: Tensor  # [size, vocab]
    hidden: Tensor  # [size, width]


def verify_sizes(max_rows: int) -> list[int]:
    """Returns the numbers of tokens to capture, at most half of which are padding."""
    most = min(max(max_rows, MIN_TOKENS), max_rows * (1 + MAX_DRAFTS))
    found = {1 << power for power in range(1, 14)} | {3 << power for power in range(3, 13)}  # sizes of decode steps too
    return [size for size in sorted(found) if size < most] + [most]


class VerifyGraphs:
    """The captured steps with drafts of one engine, by padded number of tokens."""

    def __init__(
        self,
        model: Model,
        caches: Mapping[str, Tensor],
        rows: DeviceRows,
        max_rows: int,
        pool: CapturePool,
        stream: Any,
    ):
        self._model, self._caches, self._rows = model, caches, rows
        self._pool, self._stream = pool, stream
        self._sizes = verify_sizes(max_rows)
        self._inputs = {size: UploadBuffer(self._list(Plan(0), size), rows.device) for size in self._sizes}
        self._graphs: dict[int, _Graph] = {}
        self._uses = dict.fromkeys(self._sizes, 0)
        self.num_replayed = 0
        self.num_eager = 0  # steps that ran before their size was captured, or that could not be

    def fits(self, plan: Plan) -> bool:
        """Whether every row of the plan computes a token and its drafts, and nothing else, within the largest size."""
        if not plan.drafts or plan.num_tokens > self._sizes[-1]:
            return False
        return all(row.wants_sample and row.count == 1 + row.num_drafts for row in plan.rows)

    def run(self, plan: Plan) -> Verified:
        """Runs a step that `fits`: replays its graph, captures it first if it is due, or runs the same eagerly."""
        count = plan.num_tokens
        size = next(size for size in self._sizes if size >= count)
        inputs = self._inputs[size]
        inputs.send(self._list(plan, size))
        self._uses[size] += 1
        if size not in self._graphs and self._uses[size] >= MIN_USES:
            self._try_capture(size)
        captured = self._graphs.get(size)
        if captured is None:
            self.num_eager += 1
            logits, hidden = self._compute(size)
        else:
            self.num_replayed += 1
            captured.graph.replay()
            logits, hidden = captured.logits, captured.hidden
        return Verified(inputs.views["rows"][:count], logits[:count], hidden[:count])

    def capture_missing(self) -> Iterator[None]:
        """Captures one missing graph per `next`, small ones first."""
        for size in self._sizes:
            if size not in self._graphs and self._uses[size] >= 0:
                self._warm_and_capture(size)
                yield

    @torch.inference_mode()
    def _warm_and_capture(self, size: int) -> None:
        self._inputs[size].send(self._list(Plan(0), size))
        self._compute(size)  # compiles and warms up kernels, which is not allowed during a capture
        self._try_capture(size)

    def _try_capture(self, size: int) -> None:
        """Captures a graph. If that fails, nothing has run yet; the size runs eagerly from then on."""
        try:
            graph, (logits, hidden) = capture_graph(self._stream, self._pool, lambda: self._compute(size))
        except Exception as error:
            self._uses[size] = -sys.maxsize
            line = f"Steps that verify {size} tokens could not be captured ({reason(error)}); they run eagerly."
            warnings.warn(line, stacklevel=2)
            return
        self._graphs[size] = _Graph(graph, logits, hidden)

    def _compute(self, size: int) -> tuple[Tensor, Tensor]:
        step = self._rows.gather_verify(self._inputs[size].views)
        hidden = self._model.forward(step, self._caches)
        return self._model.logits(hidden), hidden

    def _list(self, plan: Plan, size: int) -> Arrays:
        """Returns the plan's tokens as arrays. Padding belongs to the padding row, whose length stays 0."""
        each = np.array([row.count for row in plan.rows], np.int64)
        rows, (offsets, counts) = np.full(size, self._rows.padding_row, np.int64), np.zeros((2, size), np.int64)
        num_tokens = plan.num_tokens
        rows[:num_tokens] = np.repeat(np.array([row.row for row in plan.rows], np.int64), each)
        offsets[:num_tokens] = np.arange(num_tokens) - np.repeat(np.cumsum(each) - each, each)
        counts[:num_tokens] = np.repeat(each, each)
        return {"rows": rows, "offsets": offsets, "counts": counts}
