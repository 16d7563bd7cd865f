"""Captures, with a device that only pretends: one that fails leaves random numbers and caches as they were, and graphs
go on in another pool; of a step of other people's code what waits is found before anything is captured, and a replay
has to come to the same. On a real one: `tests/gpu/test_engine.py`, `tests/gpu/test_families.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.models.fallback.capture import can_capture
from quire.runtime.graphs import CapturePool, capture_graph


class Device:
    """Stands in for torch.cuda. `compute` may ask it what is going on."""

    def __init__(self) -> None:
        self.mode: Any = 0
        self.capturing = False
        self.compute: Callable[[], Tensor] | None = None
        self.replayed = 0
        stream = SimpleNamespace(wait_stream=lambda other: None)
        self.random = SimpleNamespace(clone_state=lambda: "before", graphsafe_set_state=self.put_back)
        self.put: list[str] = []
        numbers = itertools.count(1)
        self.cuda = SimpleNamespace(
            Stream=lambda: stream, current_stream=lambda: stream, stream=lambda chosen: nullcontext(),
            CUDAGraph=lambda: Graph(self), current_device=lambda: 0, default_generators=[self.random],
            graph_pool_handle=lambda: (0, next(numbers)), get_sync_debug_mode=lambda: self.mode,
            set_sync_debug_mode=lambda mode: setattr(self, "mode", mode),
        )  # fmt: skip

    def put_back(self, state: str) -> None:
        self.put.append(state)


class Graph:
    def __init__(self, device: Device):
        self.device = device

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.device.capturing = True

    def capture_end(self) -> None:
        self.device.capturing = False

    def replay(self) -> None:
        assert self.device.compute is not None
        self.device.replayed += 1
        self.device.compute()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch, "cuda", made.cuda)
    return made


def step(device: Device, cache: Tensor, trouble: Callable[[], None] = lambda: None) -> Callable[[], Tensor]:
    """Counts on in `cache`, and returns twice of it, in memory of its own when it is captured or replayed."""
    static = torch.zeros(3)

    def compute() -> Tensor:
        trouble()
        if device.capturing:  # nothing is computed then
            return static
        cache.add_(1)
        out = static if device.replayed else torch.zeros(3)
        return out.copy_(2 * cache)

    device.compute = compute
    return compute


def test_what_comes_to_the_same_can_be_captured(device: Device) -> None:
    cache = torch.ones(3)
    assert can_capture(step(device, cache), {"it": cache}, 1e-3)
    assert device.replayed == 1 and device.mode == 0 and not device.put
    assert cache.tolist() == [1.0] * 3


def test_who_waits_is_found_before_anything_is_captured(device: Device) -> None:
    def wait() -> None:
        assert not device.capturing
        if device.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    cache = torch.ones(3)
    assert not can_capture(step(device, cache, wait), {"it": cache}, 1e-3)
    assert device.mode == 0 and not device.replayed and cache.tolist() == [1.0] * 3


def test_a_capture_that_fails_leaves_everything_as_it_was(device: Device) -> None:
    def fail() -> None:
        if device.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    cache = torch.ones(3)
    assert not can_capture(step(device, cache, fail), {"it": cache}, 1e-3)
    assert device.put == ["before"] and not device.capturing and cache.tolist() == [1.0] * 3


def test_a_replay_that_comes_to_something_else_is_found(device: Device) -> None:
    cache = torch.ones(3)

    def drift() -> None:
        if device.replayed:
            cache.add_(5)

    assert not can_capture(step(device, cache, drift), {"it": cache}, 1e-3)
    assert device.replayed == 1 and cache.tolist() == [1.0] * 3


def test_a_replay_that_computes_nothing_is_found(device: Device) -> None:
    cache = torch.ones(3)
    compute = step(device, cache)
    device.compute = lambda: cache
    assert not can_capture(compute, {"it": cache}, 1e-3)


def test_graphs_go_on_in_another_pool_behind_one_that_failed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *pool: ended.append(pool), raising=False)
    pool, stream = CapturePool(), torch.cuda.Stream()
    assert capture_graph(stream, pool, lambda: "outputs")[1] == "outputs" and pool.handle == (0, 1) and not ended
    with pytest.raises(ZeroDivisionError):
        capture_graph(stream, pool, lambda: 1 // 0)
    assert pool.handle == (0, 2) and ended == [(0, (0, 1))] and device.put == ["before"]
