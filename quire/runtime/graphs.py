"""CUDA graphs of decode steps: one per row count, replayed with nothing but the numbers of the rows.

Everything else a step needs is gathered from the device rows inside the graph, so a replay is one small copy and one
launch. Graphs are captured while the engine already serves: a size that is asked for a second time is captured then,
and `capture_all` does the rest when there is time for it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from quire.models.registry import Model
from quire.runtime.rows import DeviceRows

HOT = 2  # uses of a size after which it is worth capturing


def graph_sizes(max_rows: int) -> list[int]:
    """Few sizes where padding is cheap, all of them where it is not."""
    sizes = {1, 2, 4, 8, *range(16, min(max_rows, 64) + 1, 8), *range(64, max_rows + 1, 16), max_rows}
    return sorted(size for size in sizes if size <= max_rows)


class DecodeGraphs:
    def __init__(self, model: Model, caches: Mapping[str, Tensor], rows: DeviceRows, max_rows: int):
        self._model = model
        self._caches = caches
        self._rows = rows
        self._sizes = graph_sizes(max_rows)
        self._fits = [next(s for s in self._sizes if s >= n) for n in range(1, max_rows + 1)]
        self._input = torch.full((max_rows,), rows.padding_row, dtype=torch.int64, device=rows.device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._uses = dict.fromkeys(self._sizes, 0)
        self._stream = torch.cuda.Stream(rows.device)
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, host_rows: list[int]) -> tuple[Tensor, Tensor]:
        """Row numbers in, (rows [n], logits [n, vocab]) out. Captures, replays or runs eagerly, whichever is next."""
        count = len(host_rows)
        size = self._fits[count - 1]
        padded = np.full(size, self._rows.padding_row, np.int64)
        padded[:count] = host_rows
        pinned = torch.empty(size, dtype=torch.int64, pin_memory=True)
        pinned.numpy()[:] = padded
        self._input[:size].copy_(pinned, non_blocking=True)
        graph = self._graphs.get(size)
        self._uses[size] += 1
        if graph is None and self._uses[size] >= HOT:
            graph = self._capture(size)
        if graph is None:
            logits = self._decode(self._input[:size])
        else:
            graph[0].replay()
            logits = graph[1]
        return self._input[:count], logits[:count]

    def capture_all(self) -> None:
        """Capture whatever is missing, the largest first, so that smaller ones find memory to share."""
        for size in sorted(self._sizes, reverse=True):
            if size not in self._graphs:
                self._input.fill_(self._rows.padding_row)
                self._decode(self._input[:size])  # compiles and warms what a capture may not
                self._capture(size)

    def _decode(self, rows: Tensor) -> Tensor:
        step = self._rows.gather_decode(rows)
        hidden = self._model.forward(step, self._caches)
        return self._model.logits(hidden)

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                logits = self._decode(self._input[:size])
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._graphs[size] = (graph, logits)
        return self._graphs[size]
