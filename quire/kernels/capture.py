"""What a function launches, as a CUDA graph, on the current stream."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

Outputs = TypeVar("Outputs")


def capture(compute: Callable[[], Outputs], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    """The graph, and what `compute` returned: the memory that every replay fills anew. `pool`: torch's handle of whose
    memory it takes.

    A capture that fails leaves torch's random numbers in the belief that it is still on, and whoever draws some later
    in that process (a trial of the next model's kernels, say) would fail: they get their state of before."""
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
        raise
    return graph, outputs
