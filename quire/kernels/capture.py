"""Captures a function's kernel launches as a CUDA graph on the current stream."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

Outputs = TypeVar("Outputs")


def capture(compute: Callable[[], Outputs], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    """Captures `compute` and returns the graph with the output of `compute`, whose memory every replay overwrites.

    `pool` is the handle of a graph memory pool to share. A failed capture leaves torch's CUDA generator in capture
    mode, and later random draws in the process would fail; its earlier state is restored in that case."""
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
