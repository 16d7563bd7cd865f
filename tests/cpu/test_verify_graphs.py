"""Captured steps with drafts: the sizes, that padding and repeated rows change nothing, and when they are replayed. A
stand-in captures; `tests/gpu/test_speculation.py` has the real graphs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.layers.step import PagedInputs, Step
from quire.runtime import verify_graphs
from quire.runtime.rows import DeviceRows
from quire.runtime.verify_graphs import MIN_TOKENS, VerifyGraphs, verify_sizes
from quire.types import CacheSpec, PageWrite, Plan, PlanRow, RowInit, SamplingParams
from tests.cpu.families.checks import known_answers
from tests.cpu.rig import load, make_engine, ragged_prompts, run
from tests.cpu.tiny_models import make_tiny
from tests.pure.drafting import RandomDrafter

CPU = torch.device("cpu")
PAGE = 4
VOCAB = 256
PARAMS = [
    SamplingParams(temperature=t, seed=3, max_tokens=30, ignore_eos=True, presence_penalty=p)
    for t, p in ((0.0, 0.0), (0.8, 0.0), (0.7, 0.5))
]


class Repeating:
    """A model whose attention does not read `row_index`, as on CUDA: it gets the pages of each row instead."""

    def __init__(self, model: Any):
        self._model = model
        self.logits = model.logits
        self.last = torch.zeros(0)

    def forward(self, step: Step, caches: Any) -> Tensor:
        groups: dict[str, Any] = {}
        for name, inputs in step.groups.items():
            assert isinstance(inputs, PagedInputs) and inputs.row_index is not None
            groups[name] = PagedInputs(inputs.page_table.index_select(0, inputs.row_index), inputs.slots)
        self.last = self._model.forward(replace(step, groups=groups), caches)
        return self.last


class Replayed:
    """In place of a graph: computes again, and writes where the capture's outputs are. A capture computes nothing."""

    def __init__(self, compute: Callable[[], Sequence[Tensor]], outputs: Sequence[Tensor]):
        self._compute, self._outputs = compute, outputs

    def replay(self) -> None:
        for target, value in zip(self._outputs, self._compute(), strict=True):
            target.copy_(value)


class Sized(VerifyGraphs):
    """Notes the size of each step."""

    size = 0
    used: tuple[int, ...] = ()

    def _try_capture(self, size: int) -> None:
        self.size = size
        super()._try_capture(size)

    def _compute(self, size: int) -> tuple[Tensor, Tensor]:
        self.used = (*self.used, size)
        return super()._compute(size)


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


def no_memory(*args: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.\nA page of advice")


def drafts_plan(*rows: tuple[int, int, int]) -> Plan:
    """Of (row, start, number of drafts)."""
    plan = Plan(0, [PlanRow(f"r{row}", row, start, 1 + count, count, True) for row, start, count in rows])
    plan.drafts = {index: [7] * count for index, (_, _, count) in enumerate(rows) if count}
    return plan


@pytest.mark.parametrize("max_rows", [1, 3, 8, 100, 256])
def test_sizes_are_few_and_at_most_half_of_one_is_padding(max_rows: int) -> None:
    sizes = verify_sizes(max_rows)
    assert sizes == sorted(set(sizes)) and sizes[0] == 2 and len(sizes) <= 16
    assert max(max_rows, MIN_TOKENS) in (sizes[-1], MIN_TOKENS)
    for count in range(2, sizes[-1] + 1):
        assert next(size for size in sizes if size >= count) < max(2 * count, 3)


def test_a_padded_step_computes_the_same_tokens() -> None:
    plan = drafts_plan((1, 5, 4), (3, 15, 0), (4, 20, 2))
    exact, fixed = make_rows(), make_rows()
    want = exact.gather(plan).step
    graphs = VerifyGraphs(None, {}, fixed, 6, None, None)  # type: ignore[arg-type]
    graphs._inputs[16].send(graphs._list(plan, 16))
    got = fixed.gather_verify(graphs._inputs[16].views)
    for name in ("tokens", "positions"):
        assert getattr(got, name)[:9].tolist() == getattr(want, name).tolist()
        assert getattr(got, name)[9:].tolist() == [0] * 7, name
    mine, theirs = got.groups["full"], want.groups["full"]
    assert isinstance(mine, PagedInputs) and isinstance(theirs, PagedInputs) and mine.row_index is not None
    assert mine.slots[:9].tolist() == theirs.slots.tolist()
    assert set(mine.slots[9:].tolist()) == {0}, "padding is written to the page that is nobody's"
    assert mine.row_index.tolist() == [1] * 5 + [3] + [4] * 3 + [fixed.padding_row] * 7
    assert got.seq_lens[:9].tolist() == [6, 7, 8, 9, 10, 16, 21, 22, 23]
    assert got.logits_index.tolist() == list(range(16)) and want.logits_index.tolist() == list(range(9))
    assert fixed.computed.tolist() == exact.computed.tolist() and fixed.computed[fixed.padding_row] == 0


def test_steps_of_drafts_alone_fit() -> None:
    graphs = VerifyGraphs(None, {}, make_rows(), 6, None, None)  # type: ignore[arg-type]
    assert graphs.fits(drafts_plan((1, 5, 4), (3, 15, 0)))
    assert not graphs.fits(drafts_plan((1, 5, 0), (3, 15, 0))), "those are decode steps"
    assert not graphs.fits(drafts_plan((1, 5, 64), (3, 15, 63))), "too large"
    prompt = drafts_plan((1, 5, 4))
    prompt.rows.append(PlanRow("r2", 2, 0, 7, 0, True))
    assert not graphs.fits(prompt)


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_are_those_without_speculation(depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole engine: every step with drafts alone is computed by repeated rows, and replayed from its second on."""
    model = load(make_tiny("llama", tmp_path, vocab_size=VOCAB)[1], kernels="torch")
    prompts = ragged_prompts(VOCAB)
    params = [PARAMS[index % len(PARAMS)] for index in range(len(prompts))]
    expected = run(make_engine(model), prompts, params)
    oracle = known_answers(prompts, expected)
    drafter = RandomDrafter(random.Random(1), right=0.8, silent=0.2, oracle=oracle, vocab=VOCAB, waits=0.9)
    engine = make_engine(model, drafter=drafter, depth=depth, late=depth == 2, max_batch_tokens=200)
    workers: Any = engine.workers
    runner = workers._inner.inner if depth == 2 else workers.inner
    repeating, sizes = Repeating(model), []

    def capture(stream: Any, pool: Any, compute: Callable[[], Sequence[Tensor]]) -> Any:
        size = graphs.size
        sizes.append(size)
        outputs = torch.zeros(size, model.vocab_size), torch.zeros(size, repeating.last.shape[1])
        return Replayed(compute, outputs), outputs

    monkeypatch.setattr(verify_graphs, "capture_graph", capture)
    graphs = runner._verify = Sized(repeating, runner.store.tensors, runner._rows, 16, None, None)  # type: ignore[arg-type]
    assert run(engine, prompts, params) == expected
    assert graphs.num_replayed > 5 and drafter.num_partial > 5
    assert graphs.num_eager <= len(set(graphs.used)) and sorted(sizes) == sorted(graphs._graphs)


def test_what_can_not_be_captured_stays_eager_and_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_graphs, "capture_graph", no_memory)
    graphs = VerifyGraphs(None, {}, make_rows(), 6, None, None)  # type: ignore[arg-type]
    monkeypatch.setattr(graphs, "_compute", lambda size: (torch.zeros(size, 5), torch.zeros(size, 4)))
    with pytest.warns(UserWarning, match="Steps that verify 8 tokens could not be captured") as said:
        for _ in range(4):
            done = graphs.run(drafts_plan((1, 5, 4)))
            assert len(done.logits) == len(done.hidden) == 5 and done.rows.tolist() == [1] * 5
    assert len(said) == 1 and "\n" not in str(said[0].message) and (graphs.num_replayed, graphs.num_eager) == (0, 4)
    assert 8 not in graphs._graphs


def test_all_sizes_are_captured_ahead_small_ones_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, order = make_rows(), []
    monkeypatch.setattr(verify_graphs, "capture_graph", lambda stream, pool, compute: (None, compute()))
    graphs = VerifyGraphs(None, {}, rows, 6, None, None)  # type: ignore[arg-type]
    monkeypatch.setattr(graphs, "_compute", lambda size: order.append(size) or (torch.zeros(size), torch.zeros(size)))
    before = rows.computed.tolist()
    for _ in graphs.capture_missing():
        pass
    assert list(dict.fromkeys(order)) == graphs._sizes == sorted(graphs._graphs) and rows.computed.tolist() == before
    assert not list(graphs.capture_missing())
