"""Every family whole, on a GPU, in float32: tiny random models against transformers. Hybrids: `test_hybrid`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.files.source import resolve_model
from quire.models.loader import load_model
from tests.cpu.families.harness import Family, all_families, save_checkpoint
from tests.cpu.paged_harness import HarnessRow, PagedHarness

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("family", all_families(), ids=str)
def test_logits_equal_transformers(family: Family, tmp_path: Path) -> None:
    """Catch-ups, decodes, both in one step, and a step of one row, which has kernels of its own."""
    reference = save_checkpoint(family, tmp_path)
    device = torch.device("cuda")
    model = load_model(
        resolve_model(str(tmp_path)), dtype="float32", device=device, max_model_len=None, page_tokens=16,
        strict_kernels=True,
    ).model  # fmt: skip
    if any(spec.kind == "state" for spec in model.specs):
        pytest.skip("a hybrid")
    rows = [HarnessRow([(7 * i * i + 3 + 5 * r) % 256 for i in range(n)]) for r, n in enumerate((150, 9, 60))]
    got: list[list[torch.Tensor]] = [[], [], []]
    steps = [[(0, 100), (2, 57)], [(0, 1), (1, 1), (2, 1)], [(0, 40), (2, 1)], [(0, 8), (1, 7)], [(1, 1)], [(2, 1)],
             [(0, 1)]]  # fmt: skip
    with torch.device("cuda"):
        harness = PagedHarness(model, num_pages=40, seed=2)
        for work in steps:
            out = harness.step([(rows[row], count) for row, count in work]).split([count for _, count in work])
            for (row, _), part in zip(work, out, strict=True):
                got[row].append(part.cpu())
    for row, parts in zip(rows, got, strict=True):
        with torch.inference_mode():
            want = reference(torch.tensor([row.tokens])).logits[0]
        assert (torch.cat(parts) - want).abs().max() <= 1e-4 * want.abs().max()
