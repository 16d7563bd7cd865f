"""What a function launches, as a CUDA graph, on the current stream."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

Outputs = TypeVar("Outputs")


def capture(compute: Callable[[], Outputs], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    """The graph, and what `compute` returned: the memory that every replay fills anew. `pool`: whose memory it takes.

    A capture that fails leaves torch's random numbers and its pool in the belief that it is still on, and whoever draws
    some later in that process (a trial of the next model's kernels, say), or captures into that pool, would fail. So
    random numbers get their state of before, and the pool is told."""
    random = torch.cuda.default_generators[torch.cuda.current_device()]
    state = random.clone_state()
    graph = torch.cuda.CUDAGraph()
    try:
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            outputs = compute()
        finally:
            graph.capture_end()
    except Exception:
        with suppress(Exception):
            random.graphsafe_set_state(state)
        if pool is not None:
            with suppress(Exception):  # it has ended in order
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        raise
    return graph, outputs
