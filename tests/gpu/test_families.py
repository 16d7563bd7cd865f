"""Every family whole, on a GPU, in float32: tiny random models against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.files.source import resolve_model
from quire.models.fallback.capture import can_capture
from quire.models.loading.loader import load_model
from tests.cpu.families.checks import CHECKS
from tests.cpu.families.harness import Case, Family, all_families, save_checkpoint
from tests.cpu.paged_harness import HarnessRow, PagedHarness
from tests.gpu.script import DEVICE, ON_GPU, marks

pytestmark = marks()

CAPTURED = ("gpt2", "opt")  # of those through transformers, whatever they compute in
SCHEDULES = ("chunks", "warm prefix", "swap", "recompute", "depth 2", "depth 2, swap", "depth 2, recompute")


@pytest.mark.parametrize("family", all_families(), ids=str)
def test_logits_equal_transformers(family: Family, tmp_path: Path) -> None:
    """Catch-ups, decodes, both in one step, and a step of one row, which has kernels of its own."""
    reference = save_checkpoint(family, tmp_path)
    model = load_model(
        resolve_model(str(tmp_path)), dtype="float32", device=DEVICE, max_model_len=None, page_tokens=16,
        strict_kernels=True,
    ).model  # fmt: skip
    if any(spec.kind == "state" for spec in model.specs):
        pytest.skip("a hybrid")
    rows = [HarnessRow([(7 * i * i + 3 + 5 * r) % 256 for i in range(n)]) for r, n in enumerate((150, 9, 60))]
    got: list[list[torch.Tensor]] = [[], [], []]
    steps = [[(0, 100), (2, 57)], [(0, 1), (1, 1), (2, 1)], [(0, 40), (2, 1)], [(0, 8), (1, 7)], [(1, 1)], [(2, 1)],
             [(0, 1)]]  # fmt: skip
    with DEVICE:
        harness = PagedHarness(model, num_pages=40, seed=2)
        for work in steps:
            out = harness.step([(rows[row], count) for row, count in work]).split([count for _, count in work])
            for (row, _), part in zip(work, out, strict=True):
                got[row].append(part.cpu())
    for row, parts in zip(rows, got, strict=True):
        with torch.inference_mode():
            want = reference(torch.tensor([row.tokens])).logits[0]
        assert (torch.cat(parts) - want).abs().max() <= 1e-4 * want.abs().max()


@pytest.mark.parametrize("family", all_families(), ids=str)
def test_greedy_tokens_equal_those_of_transformers(family: Family, tmp_path: Path) -> None:
    """The engine with its captured steps, whatever the schedule: the checks that every family passes on a CPU."""
    case = Case(family, tmp_path, DEVICE, page_tokens=16, strict_kernels=True)
    for name in SCHEDULES:
        CHECKS[name](case)
    assert not (ON_GPU and family.name in CAPTURED and case.model.is_eager_only())
    if ON_GPU and not case.model.is_eager_only():
        graphs = case.first_run[0].workers.inner._graphs
        assert graphs is not None and graphs._graphs, "decode steps were captured"


@pytest.mark.skipif(not ON_GPU, reason="nothing is captured elsewhere")
def test_what_can_not_be_captured_leaves_the_device_as_it_was() -> None:
    x = torch.ones(4, device=DEVICE)
    assert not can_capture(lambda: x * x.sum().item(), {"x": x}, 0.1)
    assert torch.rand(4, device=DEVICE).sum() >= 0 and x.sum() == 4
    assert can_capture(lambda: x.mul_(2), {"x": x}, 0.1) and x.sum() == 4
