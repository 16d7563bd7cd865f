"""CUDA graphs of decode steps: one per padded row count, replayed with only the row numbers as input.

All other inputs are gathered from the device rows inside the graph. If all rows use greedy or temperature sampling, the
graph samples, too: a replay is then one launch and one copy to the host. Graphs are captured while the engine serves: a
size is captured at its second use, and `capture_missing` captures the rest between steps.
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
from quire.models.model import Model
from quire.runtime.rows import DeviceRows
from quire.sampling.sampler import Sampled

NUM_EARLY_SIZES = 4  # number of smallest sizes, which are captured first
MIN_USES = 2  # uses of a size from which it is captured
PADDING = -1  # row number of padding


def graph_sizes(max_rows: int) -> list[int]:
    """Returns the row counts to capture: dense for small steps, for which padding costs most, sparse for large ones."""
    sizes = {1, 2, 4, 8, *range(16, min(max_rows, 64) + 1, 8), *range(64, max_rows + 1, 16), max_rows}
    return sorted(size for size in sizes if size <= max_rows)


@dataclass(slots=True)
class DecodeResult:
    """The outputs of a decode step."""

    rows: Tensor  # [n] int64
    logits: Tensor  # [n, vocab]
    hidden: Tensor  # [n, width]
    chosen: Sampled | None  # tokens sampled by the graph, being copied to the host


@dataclass(slots=True)
class _DecodeOutputs:
    """Output tensors of a graph or of an eager run."""

    logits: Tensor  # [size, vocab]
    hidden: Tensor  # [size, width]
    chosen: Tensor | None  # [9 * size] bytes: tokens as int64, then the bad flags


class DecodeGraphs:
    """The captured decode steps of one engine, by padded number of rows."""

    def __init__(self, model: Model, caches: Mapping[str, Tensor], rows: DeviceRows, ops: RowOps, max_rows: int):
        self._model = model
        self._caches = caches
        self._rows = rows
        self._ops = ops
        self._sizes = graph_sizes(max_rows)
        self._padded_sizes = [next(s for s in self._sizes if s >= n) for n in range(1, max_rows + 1)]
        self._input = torch.full((max_rows,), PADDING, dtype=torch.int64, device=rows.device)
        self._host_rows: list[int] = []  # contents of `_input`, which need no copy while the same rows decode
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, _DecodeOutputs]] = {}
        self._uses = {(size, choose): 0 for size in self._sizes for choose in (True, False)}
        self.stream = torch.cuda.Stream(rows.device)  # captures run on it, those of mixed steps too
        self.pool = CapturePool()

    def run(self, host_rows: list[int], choose: bool) -> DecodeResult:
        """Runs a decode step of these rows: replays its graph, captures it first if it is due, or runs eagerly.
        `choose`: every row is plain, so the step samples, too."""
        count = len(host_rows)
        kind = (self._padded_sizes[count - 1], choose)
        self._send(host_rows)
        self._uses[kind] += 1
        graph = self._graphs.get(kind)
        if graph is None and self._uses[kind] >= MIN_USES:
            graph = self._try_capture(kind)
        if graph is None:
            outputs = self._decode(kind)
        else:
            graph[0].replay()
            outputs = graph[1]
        chosen = None
        if outputs.chosen is not None:
            chosen = fetch_chosen(outputs.chosen, count)
        return DecodeResult(self._input[:count], outputs.logits[:count], outputs.hidden[:count], chosen)

    def capture_missing(self) -> Iterator[None]:
        """Captures one missing graph per `next`: small ones first, which a lightly loaded server uses most, then from
        the largest down, so that smaller graphs reuse the memory of larger ones."""
        few, many = self._sizes[:NUM_EARLY_SIZES], sorted(self._sizes[NUM_EARLY_SIZES:], reverse=True)
        for size in [*few, *many]:
            for kind in ((size, True), (size, False)):
                if kind not in self._graphs and self._uses[kind] >= 0:
                    self._warm_and_capture(kind)
                    yield

    @torch.inference_mode()
    def _warm_and_capture(self, kind: tuple[int, bool]) -> None:
        self._send([])
        self._decode(kind)  # compiles and warms up kernels, which is not allowed during a capture
        self._try_capture(kind)

    def _send(self, host_rows: list[int]) -> None:
        if host_rows == self._host_rows:
            return
        padded = host_rows + [PADDING] * (len(self._input) - len(host_rows))
        self._input.copy_(torch.tensor(padded, dtype=torch.int64, device="cpu").pin_memory(), non_blocking=True)
        self._host_rows = host_rows

    def _decode(self, kind: tuple[int, bool]) -> _DecodeOutputs:
        size, choose = kind
        return decode_rows(self._model, self._caches, self._rows, self._ops, self._input[:size], choose)

    def _try_capture(self, kind: tuple[int, bool]) -> tuple[torch.cuda.CUDAGraph, _DecodeOutputs] | None:
        """Captures a graph. If that fails, for example for lack of memory or because a kernel must be compiled, nothing
        has run yet; the kind runs eagerly from then on."""
        try:
            return self._capture(kind)
        except Exception as error:
            self._uses[kind] = -sys.maxsize
            line = f"Steps of {kind[0]} rows could not be captured ({reason(error)}); they run eagerly."
            warnings.warn(line, stacklevel=2)
            return None

    def _capture(self, kind: tuple[int, bool]) -> tuple[torch.cuda.CUDAGraph, _DecodeOutputs]:
        self._graphs[kind] = capture_graph(self.stream, self.pool, lambda: self._decode(kind))
        return self._graphs[kind]


def decode_rows(
    model: Model, caches: Mapping[str, Tensor], device_rows: DeviceRows, ops: RowOps, rows: Tensor, choose: bool
) -> _DecodeOutputs:
    """Decodes one token of each of `rows` [n] int64, with inputs from device memory only; with `choose` it also samples
    the next token."""
    decode = device_rows.gather_decode(rows, ops)
    hidden = model.forward(decode.step, caches)
    logits = model.logits(hidden)
    chosen = None
    if choose:
        append_to = (rows, device_rows.tokens, device_rows.computed)
        chosen = choose_tokens(ops, logits, decode.keys, decode.lengths, decode.scales, append_to)
    return _DecodeOutputs(logits, hidden, chosen)


def choose_tokens(
    ops: RowOps, logits: Tensor, keys: Tensor, lengths: Tensor, scales: Tensor, append_to: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Samples a token for each row of `logits` [n, vocab], greedy or by temperature, and appends it to its device row.
    Returns tokens and bad flags in one tensor of [9 * n] bytes, so that one copy takes them to the host."""
    size = len(logits)
    chosen = torch.empty(9 * size, dtype=torch.uint8, device=logits.device)
    out = chosen[: 8 * size].view(torch.int64), chosen[8 * size :].view(torch.bool)
    ops.choose(logits, keys, lengths, scales, append_to=append_to, out=out)
    return chosen


def fetch_chosen(chosen: Tensor, count: int) -> Sampled:
    """Starts the copy of `choose_tokens`' result to the host and returns the first `count` samples. The copy is ordered
    in the stream before the next replay, which overwrites the result."""
    host = chosen.to("cpu", non_blocking=True)
    size = len(host) // 9
    return Sampled(host[: 8 * size].view(torch.int64)[:count], host[8 * size :].view(torch.bool)[:count], None)


class CapturePool:
    """The memory pool that all graphs share: the replay of one graph may overwrite the outputs of another."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()

    def renew(self) -> None:
        """Starts a new pool after a failed capture, because torch considers the capture into the old one unfinished and
        refuses further ones. Existing graphs keep their memory."""
        with suppress(Exception):  # the capture had ended properly
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.handle)
        self.handle = torch.cuda.graph_pool_handle()


def capture_graph(
    stream: torch.cuda.Stream, pool: CapturePool, compute: Callable[[], Outputs]
) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    """Captures the launches of `compute` on `stream`; see `capture`."""
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            captured = capture(compute, pool.handle)
    except Exception:
        pool.renew()
        raise
    torch.cuda.current_stream().wait_stream(stream)
    return captured
