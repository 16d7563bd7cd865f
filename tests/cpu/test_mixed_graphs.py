"""Mixed steps padded to a fixed size: the sizes, and that padding changes nothing of what the step computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.kernels.upload import UploadBuffer
from quire.layers.step import PagedInputs
from quire.runtime.mixed_graphs import (
    MAX_PREFILLS,
    MixedGraphs,
    MixedSize,
    _MixedOutputs,
    fitting_size,
    mixed_sizes,
    num_samples,
    pad_step,
)
from quire.runtime.rows import DeviceRows, list_step
from quire.types import CacheSpec, PageWrite, Plan, PlanRow, RowInit, SamplingParams

CPU = torch.device("cpu")
PAGE = 4


def plan_of(*rows: tuple[int, int, int, bool]) -> Plan:
    return Plan(0, [PlanRow(f"r{row}", row, start, count, 0, wants) for row, start, count, wants in rows])


def make_rows() -> DeviceRows:
    rows = DeviceRows(6, 40, [CacheSpec("full", "paged", (0,), (1, 16), "float32", page_tokens=PAGE)], CPU)
    params = SamplingParams()
    added = [
        RowInit(f"r{row}", row, [10 * row + i for i in range(30)], 30, 5 * row, params, (), 0, 0) for row in range(1, 5)
    ]
    writes = [PageWrite(0, row, 0, [10 * row + i for i in range(9)]) for row in range(1, 5)]
    draws = {"keys": torch.arange(4).numpy(), "scales": torch.ones(4).numpy()}
    rows.apply(Plan(0, added=added, page_writes=writes), draws)
    return rows


def test_a_padded_step_computes_the_same_tokens() -> None:
    plan = plan_of((1, 5, 6, False), (3, 15, 1, True), (4, 20, 3, True))
    size = MixedSize(32, 4)
    exact, fixed = make_rows(), make_rows()
    want = exact.gather(plan, [row.start + row.count for row in plan.rows if row.wants_sample])
    landing = UploadBuffer(pad_step(list_step(Plan(0, [])), size, fixed.padding_row), CPU)
    landing.send(pad_step(list_step(plan), size, fixed.padding_row))
    got = fixed.gather_fixed(landing.views, {"full": "work"})
    for name in ("tokens", "positions"):
        assert getattr(got.step, name)[:10].tolist() == getattr(want.step, name).tolist()
        assert getattr(got.step, name)[10:].tolist() == [0] * 22, name
    mine, theirs = got.step.groups["full"], want.step.groups["full"]
    assert isinstance(mine, PagedInputs) and isinstance(theirs, PagedInputs)
    assert mine.work == "work"
    assert mine.slots[:10].tolist() == theirs.slots.tolist()
    assert set(mine.slots[10:].tolist()) == {0}, "padding is written to the page that is nobody's"
    assert mine.page_table[:3].tolist() == theirs.page_table.tolist()
    assert got.step.logits_index[:2].tolist() == want.step.logits_index.tolist()
    assert got.sample_rows.tolist() == [3, 4] + [fixed.padding_row] * (size.samples - 2)
    assert fixed.computed.tolist() == exact.computed.tolist()


def test_a_step_takes_the_smallest_size_that_is_there() -> None:
    sizes = dict.fromkeys(mixed_sizes(256))
    assert fitting_size(plan_of((1, 0, 60, True)), sizes) == MixedSize(64, 0)
    assert fitting_size(plan_of((1, 0, 60, True), (2, 9, 1, True)), sizes) == MixedSize(128, 64)
    decodes = [(row, 9, 1, True) for row in range(70)]
    assert fitting_size(plan_of((99, 0, 200, True), *decodes), sizes) == MixedSize(384, 256)
    assert fitting_size(plan_of((1, 0, 1900, True), *decodes), sizes) == MixedSize(2048, 256)


def test_what_would_be_mostly_padding_is_not_padded() -> None:
    sizes = {MixedSize(2048, 0): None, MixedSize(512, 0): None}
    assert fitting_size(plan_of((1, 0, 40, True)), sizes) == MixedSize(512, 0), "small: launches would take longer"
    assert fitting_size(plan_of((1, 0, 1000, True)), sizes) is None
    assert fitting_size(plan_of((1, 0, 1600, True)), sizes) == MixedSize(2048, 0)
    assert fitting_size(plan_of((1, 0, 2049, True)), sizes) is None


def test_too_many_prompts_at_once_are_not_padded() -> None:
    sizes = {MixedSize(512, 0): None}
    rows = [(row, 0, 4, True) for row in range(MAX_PREFILLS)]
    assert fitting_size(plan_of(*rows), sizes) is not None
    assert fitting_size(plan_of(*rows, (50, 0, 4, True)), sizes) is None


def test_rows_with_drafts_take_the_place_of_prompts() -> None:
    plan = plan_of((1, 0, 60, True), (2, 9, 4, True), (3, 9, 1, True))
    plan.rows[1].num_drafts, plan.drafts = 3, {1: [5, 6, 7]}
    assert num_samples(plan) == 1 + 4 + 1
    sizes = dict.fromkeys(mixed_sizes(256))
    assert fitting_size(plan, sizes) == MixedSize(128, 64)
    arrays = pad_step(list_step(plan), MixedSize(128, 64), 99)
    assert arrays["sample_rows"][:7].tolist() == [1, 2, 2, 2, 2, 3, 99]
    assert arrays["logits_index"][:6].tolist() == [59, 60, 61, 62, 63, 64]
    assert arrays["sample_places"][:6].tolist() == [0, 1, 1, 1, 1, 2]
    many = plan_of((1, 0, 60, True), (2, 9, 13, True))
    many.rows[1].num_drafts, many.drafts = 12, {1: [5] * 12}
    assert fitting_size(many, {MixedSize(128, 0): None}) is None, "more samples than the size has"


class Replayed:
    """In place of a graph."""

    def replay(self) -> None:
        pass


class Listed:
    """In place of a group's work, by which some layer has attended."""

    is_used = True

    def __init__(self) -> None:
        self.filled: list[tuple[list[int], list[int]]] = []

    def fill(self, counts: list[int], bounds: list[int]) -> None:
        self.filled.append((counts, bounds))


@pytest.mark.parametrize("kind", ["captured_work.CapturedWork", "deterministic_tiles.CapturedTiles"])
def test_a_group_whose_only_layer_is_the_last_has_nothing_to_list(kind: str) -> None:
    """That layer attends for sampled tokens alone, by a plan of its own."""
    pytest.importorskip("triton")
    module, name = kind.split(".")
    unused = getattr(__import__(f"quire.kernels.triton.attention.{module}", fromlist=[name]), name)(32, 4, MAX_PREFILLS)
    rows, size, nothing = make_rows(), MixedSize(32, 4), torch.zeros(0)
    graphs = MixedGraphs(None, {}, rows, None, lambda *_: Listed(), 4, None, None)  # type: ignore[arg-type]
    made: Any = graphs.make(size)
    made.works["windowed"] = unused
    made.graph, made.outputs = Replayed(), _MixedOutputs(torch.zeros(size.samples, 8), nothing)
    graphs._graphs[size] = made
    computed = graphs.run(plan_of((1, 5, 6, False), (3, 15, 1, True)), choose=False)
    assert computed is not None
    assert computed.rows.tolist() == [3]
    assert made.works["full"].filled == [([6, 1], [11, 16])]
