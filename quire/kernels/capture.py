"""What a function launches, as a CUDA graph, on the current stream."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

Outputs = TypeVar("Outputs")


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


def capture(compute: Callable[[], Outputs], pool: CapturePool | None = None) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    """The graph, and what `compute` returned: the memory that every replay fills anew.

    A capture that fails leaves torch's random numbers, too, in the belief that it is still on, and whoever draws some
    later in that process (a trial of the next model's kernels, say) would fail: they get their state of before."""
    random = torch.cuda.default_generators[torch.cuda.current_device()]
    state = random.clone_state()
    graph = torch.cuda.CUDAGraph()
    try:
        graph.capture_begin(None if pool is None else pool.handle, capture_error_mode="thread_local")
        try:
            outputs = compute()
        finally:
            graph.capture_end()
    except Exception:
        with suppress(Exception):
            random.graphsafe_set_state(state)
        if pool is not None:
            pool.begin_anew()
        raise
    return graph, outputs
