"""CUDA graphs of decode steps: one per row count, replayed with nothing but the numbers of the rows.

Everything else a step needs is gathered from the device rows inside the graph, and where nobody asks for more than
greedy choice or temperature the graph samples too: a replay is then one launch and one copy back. Graphs are captured
while the engine already serves: a size that is asked for a second time is captured then, and `capture_missing`
does the rest, one by one, when there is time for it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.capture import Outputs, capture
from quire.kernels.table import RowOps
from quire.kernels.validation.failures import reason
from quire.models.registry import Model
from quire.runtime.rows import DeviceRows
from quire.sampling.sampler import Sampled

FEW = 4  # sizes that are captured first
HOT = 2  # uses of a size after which it is worth capturing
PADDING = -1  # a row number that stands for nobody


def graph_sizes(max_rows: int) -> list[int]:
    """Few sizes where padding is cheap, all of them where it is not."""
    sizes = {1, 2, 4, 8, *range(16, min(max_rows, 64) + 1, 8), *range(64, max_rows + 1, 16), max_rows}
    return sorted(size for size in sizes if size <= max_rows)


@dataclass(slots=True)
class Decoded:
    rows: Tensor  # [n] int64
    logits: Tensor  # [n, vocab]
    chosen: Sampled | None  # on its way to the host


@dataclass(slots=True)
class _Outputs:
    """Where a graph, or an eager run, leaves its results."""

    logits: Tensor  # [size, vocab]
    chosen: Tensor | None  # [9 * size] bytes: tokens as int64, then a flag each for those that could not be chosen


class DecodeGraphs:
    def __init__(self, model: Model, caches: Mapping[str, Tensor], rows: DeviceRows, ops: RowOps, max_rows: int):
        self._model = model
        self._caches = caches
        self._rows = rows
        self._ops = ops
        self._sizes = graph_sizes(max_rows)
        self._fits = [next(s for s in self._sizes if s >= n) for n in range(1, max_rows + 1)]
        self._input = torch.full((max_rows,), PADDING, dtype=torch.int64, device=rows.device)
        self._host_rows: list[int] = []  # what `_input` holds: decoding asks for the same rows step after step
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, _Outputs]] = {}
        self._uses = {(size, choose): 0 for size in self._sizes for choose in (True, False)}
        self.stream = torch.cuda.Stream(rows.device)  # to capture on, and the memory graphs share; for mixed steps too
        self.pool = CapturePool()

    def run(self, host_rows: list[int], choose: bool) -> Decoded:
        """Captures, replays or runs eagerly, whichever is next. `choose`: every row is plain, so sample too."""
        count = len(host_rows)
        kind = (self._fits[count - 1], choose)
        self._send(host_rows)
        self._uses[kind] += 1
        graph = self._graphs.get(kind)
        if graph is None and self._uses[kind] >= HOT:
            graph = self._try_capture(kind)
        if graph is None:
            outputs = self._decode(kind)
        else:
            graph[0].replay()
            outputs = graph[1]
        chosen = None
        if outputs.chosen is not None:
            chosen = fetch_chosen(outputs.chosen, count)
        return Decoded(self._input[:count], outputs.logits[:count], chosen)

    def capture_missing(self) -> Iterator[None]:
        """Whatever is missing, one with each `next`: those of a few rows first, which a quiet server needs all the
        time, then from the largest down, so that smaller ones find memory to share."""
        few, many = self._sizes[:FEW], sorted(self._sizes[FEW:], reverse=True)
        for size in [*few, *many]:
            for kind in ((size, True), (size, False)):
                if kind not in self._graphs and self._uses[kind] >= 0:
                    self._warm_and_capture(kind)
                    yield

    @torch.inference_mode()
    def _warm_and_capture(self, kind: tuple[int, bool]) -> None:
        self._send([])
        self._decode(kind)  # compiles and warms what a capture may not
        self._try_capture(kind)

    def _send(self, host_rows: list[int]) -> None:
        if host_rows == self._host_rows:
            return
        padded = host_rows + [PADDING] * (len(self._input) - len(host_rows))
        self._input.copy_(torch.tensor(padded, dtype=torch.int64, device="cpu").pin_memory(), non_blocking=True)
        self._host_rows = host_rows

    def _decode(self, kind: tuple[int, bool]) -> _Outputs:
        size, choose = kind
        return decode_rows(self._model, self._caches, self._rows, self._ops, self._input[:size], choose)

    def _try_capture(self, kind: tuple[int, bool]) -> tuple[torch.cuda.CUDAGraph, _Outputs] | None:
        """Nothing has run yet when a capture fails, for want of memory say, or over a kernel that was to be compiled:
        that kind stays eager from then on."""
        try:
            return self._capture(kind)
        except Exception as error:
            self._uses[kind] = -sys.maxsize
            line = f"Steps of {kind[0]} rows could not be captured ({reason(error)}); they run eagerly."
            warnings.warn(line, stacklevel=2)
            return None

    def _capture(self, kind: tuple[int, bool]) -> tuple[torch.cuda.CUDAGraph, _Outputs]:
        self._graphs[kind] = capture_graph(self.stream, self.pool, lambda: self._decode(kind))
        return self._graphs[kind]


def decode_rows(model: Model, caches: Mapping[str, Tensor], device_rows: DeviceRows, ops: RowOps, rows: Tensor,
                choose: bool) -> _Outputs:  # fmt: skip
    """One token for each of `rows` [n] int64, from the device alone; with `choose` the next one is sampled, too."""
    decode = device_rows.gather_decode(rows, ops)
    logits = model.logits(model.forward(decode.step, caches))
    chosen = None
    if choose:
        append_to = (rows, device_rows.tokens, device_rows.computed)
        chosen = choose_tokens(ops, logits, decode.keys, decode.lengths, decode.scales, append_to)
    return _Outputs(logits, chosen)


def choose_tokens(ops: RowOps, logits: Tensor, keys: Tensor, lengths: Tensor, scales: Tensor,
           append_to: tuple[Tensor, Tensor, Tensor]) -> Tensor:  # fmt: skip
    """Greedy or by temperature, a token for each of `logits` [n, vocab], which joins its row. Tokens and flags are in
    one tensor, [9 * n] bytes: one copy takes them to the host."""
    size = len(logits)
    chosen = torch.empty(9 * size, dtype=torch.uint8, device=logits.device)
    out = chosen[: 8 * size].view(torch.int64), chosen[8 * size :].view(torch.bool)
    ops.choose(logits, keys, lengths, scales, append_to=append_to, out=out)
    return chosen


def fetch_chosen(chosen: Tensor, count: int) -> Sampled:
    """What `choose_tokens` left, on its way to the host: of the first `count` rows. Behind the graph in its stream, so
    the next replay can't overwrite what is still to be copied."""
    host = chosen.to("cpu", non_blocking=True)
    size = len(host) // 9
    return Sampled(host[: 8 * size].view(torch.int64)[:count], host[8 * size :].view(torch.bool)[:count], None)


class CapturePool:
    """Memory that graphs share: one that is replayed may write over what another one left."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()

    def begin_anew(self) -> None:
        """Behind a capture into it that failed: torch takes that one to be still on, and would let no other begin.
        Graphs that are there keep the memory they have."""
        with suppress(Exception):  # it has ended in order
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.handle)
        self.handle = torch.cuda.graph_pool_handle()


def capture_graph(
    stream: torch.cuda.Stream, pool: CapturePool, compute: Callable[[], Outputs]
) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    """What `compute` launches, captured on `stream`; see `capture`."""
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            captured = capture(compute, pool.handle)
    except Exception:
        pool.begin_anew()
        raise
    torch.cuda.current_stream().wait_stream(stream)
    return captured
