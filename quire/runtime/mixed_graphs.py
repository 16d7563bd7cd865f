"""CUDA graphs of mixed steps, in which some rows decode and some prefill a few hundred tokens.

Launched kernel by kernel, such a step takes the host longer than the device: a short prompt, or the uncached end of a
long one, would wait for the host, and so would all requests that decode in the same step. Steps are padded to a few
sizes; graphs read their work lists from fixed buffers, which are filled before each replay. Graphs are captured in idle
moments; a step whose size is not captured yet runs eagerly.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.table import RowOps
from quire.kernels.upload import Arrays, UploadBuffer
from quire.kernels.validation.failures import reason
from quire.models.model import Model
from quire.runtime.graphs import CapturePool, capture_graph, choose_tokens, fetch_chosen
from quire.runtime.rows import DeviceRows, list_step
from quire.sampling.sampler import Sampled
from quire.types import STEP_SIZES, Plan

MAX_PREFILLS = 8  # maximum prefill rows in a captured step
MANY_DECODES = 64  # decode rows of the middle size
SMALL = 512  # tokens; up to here padding costs less than launching kernel by kernel
MAX_PADDING = 1.34  # maximum ratio of padded to computed tokens above `SMALL`


@dataclass(frozen=True, slots=True)
class MixedSize:
    """The padded size of a captured mixed step."""

    tokens: int
    decodes: int  # decode rows

    @property
    def samples(self) -> int:
        return self.decodes + MAX_PREFILLS

    @property
    def rows(self) -> int:
        """Rows of the step, of which the last is always padding and has all padding tokens."""
        return self.decodes + MAX_PREFILLS + 1


@dataclass(slots=True)
class MixedResult:
    """The outputs of a mixed step."""

    rows: Tensor  # [samples] int64
    hidden: Tensor  # [samples, width]
    chosen: Sampled | None  # sampled tokens, being copied to the host, if every row is plain


@dataclass(slots=True)
class _MixedOutputs:
    hidden: Tensor  # [size.samples, width]
    chosen: Tensor  # result of `graphs.choose_tokens`; other sampling overwrites the appended tokens


@dataclass(slots=True)
class _MixedGraph:
    inputs: UploadBuffer
    works: dict[str, Any]  # cache group -> work lists
    graph: torch.cuda.CUDAGraph | None = None
    outputs: _MixedOutputs | None = None


class MixedGraphs:
    """The captured mixed steps of one engine, by size."""

    def __init__(
        self,
        model: Model,
        caches: Mapping[str, Tensor],
        rows: DeviceRows,
        ops: RowOps,
        captured_work: Callable[[int, int, int], Any],
        max_rows: int,
        pool: CapturePool,
        stream: Any,
    ):
        self._model, self._caches, self._rows, self._ops = model, caches, rows, ops
        self._captured_work = captured_work
        self._pool, self._stream = pool, stream
        self._sizes = mixed_sizes(max_rows)
        self._graphs: dict[MixedSize, _MixedGraph] = {}

    def run(self, plan: Plan, choose: bool) -> MixedResult | None:
        """Replays the step's graph; returns None if there is none. `choose`: every row uses greedy or temperature
        sampling only, and none has drafts."""
        size = fitting_size(plan, self._graphs)
        if size is None:
            return None
        captured = self._graphs[size]
        assert captured.graph is not None and captured.outputs is not None
        arrays = pad_step(list_step(plan), size, self._rows.padding_row)
        captured.inputs.send(arrays)
        counts, bounds = [row.count for row in plan.rows], [row.start + row.count for row in plan.rows]
        for work in captured.works.values():
            if work.is_used:
                work.fill(counts, bounds)
        captured.graph.replay()
        count, outputs = num_samples(plan), captured.outputs
        chosen = fetch_chosen(outputs.chosen, count) if choose and count else None
        return MixedResult(captured.inputs.views["sample_rows"][:count], outputs.hidden[:count], chosen)

    def capture_missing(self) -> Iterator[None]:
        """Captures one missing graph per `next`, small ones first. If a capture fails or the kernels do not support it,
        all further sizes run eagerly."""
        for size in self._sizes:
            if size not in self._graphs:
                try:
                    self._graphs[size] = self._capture(size)
                except NotImplementedError:
                    return
                except Exception as error:
                    line = f"Mixed steps of {size.tokens} tokens could not be captured ({reason(error)})."
                    warnings.warn(line, stacklevel=2)
                    return
                yield

    @torch.inference_mode()
    def _capture(self, size: MixedSize) -> _MixedGraph:
        made = self.make(size)
        self.compute(made)  # compiles and warms up kernels, which is not allowed during a capture
        made.graph, made.outputs = capture_graph(self._stream, self._pool, lambda: self.compute(made))
        return made

    def make(self, size: MixedSize) -> _MixedGraph:
        empty = pad_step(list_step(Plan(0, [])), size, self._rows.padding_row)
        works = {spec.group: self._captured_work(size.tokens, size.decodes, MAX_PREFILLS) for spec in self._rows.specs}
        return _MixedGraph(UploadBuffer(empty, self._rows.device), works)

    def compute(self, made: _MixedGraph) -> _MixedOutputs:
        gathered = self._rows.gather_fixed(made.inputs.views, made.works)
        hidden = self._model.forward(gathered.step, self._caches)
        device, rows = self._rows, gathered.sample_rows
        draws = (device.keys[rows], device.computed[rows], device.scales[rows])
        append_to = (rows, device.tokens, device.computed)
        return _MixedOutputs(hidden, choose_tokens(self._ops, self._model.logits(hidden), *draws, append_to))


def num_samples(plan: Plan) -> int:
    """Returns how many tokens the step samples: one for each row that samples, and one for each draft."""
    return sum(1 + row.num_drafts for row in plan.rows if row.wants_sample)


def mixed_sizes(max_rows: int) -> list[MixedSize]:
    """Returns the sizes to capture, small ones first: those of a mostly cached prompt, alone and beside decode rows."""
    found = []
    for tokens in STEP_SIZES:
        for decodes in dict.fromkeys((0, min(MANY_DECODES, max_rows), max_rows)):
            if decodes < tokens and (decodes > 0 or tokens <= SMALL or tokens % SMALL == 0):
                found.append(MixedSize(tokens, decodes))
    return found


def fitting_size(plan: Plan, captured: Mapping[MixedSize, Any]) -> MixedSize | None:
    """Returns the smallest captured size that the plan fits without much padding; None if there is none."""
    tokens = sum(row.count for row in plan.rows)
    decodes = sum(row.count == 1 for row in plan.rows)  # rows with drafts take the place of prefills
    if len(plan.rows) - decodes > MAX_PREFILLS:
        return None
    most, samples = max(SMALL, int(MAX_PADDING * tokens)), num_samples(plan)
    fits = [size for size in captured if tokens <= size.tokens <= most and decodes <= size.decodes]
    fits = [size for size in fits if samples <= size.samples]
    return min(fits, key=lambda size: (size.tokens, size.decodes), default=None)


def pad_step(arrays: Arrays, size: MixedSize, padding_row: int) -> Arrays:
    """Pads the step's arrays to the size. Padding tokens belong to the padding row, whose length stays 0."""
    num_tokens = int(arrays["counts"].sum())
    places = arrays.get("places", np.arange(num_tokens))
    return {
        "rows": _padded(arrays["rows"], size.rows, padding_row, np.int64),
        "counts": _padded(arrays["counts"], size.rows, 0, np.int64),
        "query_starts": _padded(arrays["query_starts"], size.rows + 1, num_tokens, np.int32),
        "logits_index": _padded(arrays["logits_index"], size.samples, 0, np.int64),
        "sample_places": _padded(arrays["sample_places"], size.samples, size.rows - 1, np.int64),
        "sample_rows": _padded(arrays["sample_rows"], size.samples, padding_row, np.int64),
        "places": _padded(places, size.tokens, size.rows - 1, np.int64),
        "offsets": _padded(arrays.get("offsets", np.zeros(num_tokens)), size.tokens, 0, np.int64),
    }


def _padded(array: np.ndarray, length: int, value: int, dtype: type) -> np.ndarray:
    padded: np.ndarray = np.full(length, value, dtype)
    padded[: len(array)] = array
    return padded
