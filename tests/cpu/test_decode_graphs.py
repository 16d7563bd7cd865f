"""Which decode steps are captured, and when: every number of rows finds a size, what is in use is captured at its
second use while the engine serves, the rest in idle moments, and a capture that fails leaves its steps eager. A
stand-in takes the device's place; `tests/gpu/test_engine.py` has the tokens."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.runtime import graphs
from quire.runtime.graphs import DecodeGraphs, graph_sizes

Kind = tuple[int, bool]  # size, and whether the graph samples


class Recorded(DecodeGraphs):
    """Notes what is computed, and gives out as many rows as were asked for."""

    computed: list[Kind]

    def _decode(self, kind: Kind) -> Any:
        self.computed.append(kind)
        size, choose = kind
        chosen = torch.zeros(9 * size, dtype=torch.uint8) if choose else None
        return graphs._DecodeOutputs(torch.zeros(size, 5), torch.zeros(size, 4), chosen)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[Recorded, list[str]]]:
    """Returns the graphs of so many rows and what happens to them: "captured" or "replayed"."""
    happened: list[str] = []
    replay = SimpleNamespace(replay=lambda: happened.append("replayed"))

    def capture(stream: Any, pool: Any, compute: Callable[[], Any]) -> Any:
        happened.append("captured")
        return replay, compute()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(graphs, "capture_graph", capture)

    def made(max_rows: int) -> tuple[Recorded, list[str]]:
        rows: Any = SimpleNamespace(device=torch.device("cpu"))
        found = Recorded(None, {}, rows, None, max_rows)  # type: ignore[arg-type]
        found.computed = []
        return found, happened

    return made


@pytest.mark.parametrize("max_rows", [1, 3, 8, 60, 100, 256, 300])
def test_every_number_of_rows_up_to_the_limit_has_a_size(
    max_rows: int, make: Callable[[int], tuple[Recorded, list[str]]]
) -> None:
    sizes = graph_sizes(max_rows)
    assert sizes == sorted(set(sizes)) and sizes[-1] == max_rows
    found, _ = make(max_rows)
    for count in range(1, max_rows + 1):
        decoded = found.run(list(range(count)), choose=False)
        size = found.computed[-1][0]
        assert size == min(s for s in sizes if s >= count) and size < count + max(8, count)
        assert len(decoded.rows) == len(decoded.logits) == count
        assert found._input[:count].tolist() == list(range(count)) and (found._input[count:] == -1).all()


def test_what_is_used_is_captured_at_its_second_use(make: Callable[[int], tuple[Recorded, list[str]]]) -> None:
    found, happened = make(64)
    for _ in range(3):
        found.run([1, 2, 3], choose=True)
    assert happened == ["captured", "replayed", "replayed"] and found.computed == [(4, True)] * 2
    found.run([7, 8, 9], choose=True)
    assert happened.pop() == "replayed" and found._input[:4].tolist() == [7, 8, 9, -1]
    found.run([1, 2, 3], choose=False)
    assert happened[3:] == [], "that one does not sample: another graph"


def test_the_rest_is_captured_ahead_small_ones_first_then_from_the_largest_down(
    make: Callable[[int], tuple[Recorded, list[str]]],
) -> None:
    found, _ = make(64)
    for _ in range(2):
        found.run(list(range(20)), choose=True)
    found.computed.clear()
    for _ in found.capture_missing():
        pass
    order = list(dict.fromkeys(found.computed))
    assert [size for size, choose in order if choose] == [1, 2, 4, 8, 64, 56, 48, 40, 32, 16], "24 is there already"
    assert found._graphs.keys() == {(size, choose) for size in graph_sizes(64) for choose in (True, False)}


def test_what_can_not_be_captured_stays_eager_and_is_said_once(
    make: Callable[[int], tuple[Recorded, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nA page of advice")

    found, happened = make(64)
    monkeypatch.setattr(graphs, "capture_graph", no_memory)
    with pytest.warns(UserWarning, match="Steps of 4 rows could not be captured") as said:
        for _ in range(4):
            assert len(found.run([1, 2, 3], choose=True).logits) == 3
    assert len(said) == 1 and "\n" not in str(said[0].message) and happened == [] and found.computed == [(4, True)] * 4
