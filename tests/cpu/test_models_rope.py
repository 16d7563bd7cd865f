"""Rope in combinations that no published config has, or that the families' tiny ones leave out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Phi3Config

from quire.files.source import resolve_model
from quire.models.loading.loader import load_model
from tests.cpu.families.checks import check_logits
from tests.cpu.families.harness import TINY, Case, Family, all_families, save_checkpoint
from tests.cpu.families.phi import LONG
from tests.cpu.paged_harness import HarnessRow, PagedHarness
from tests.cpu.rig import CPU

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
# Heads that turn in part: without a norm, as neighbours, with biases, with norms of each head, with wide ones, gated.
PARTIAL = ("phi", "glm4", "stablelm", "glm4_moe", "minimax_m2", "qwen3_5_text", "bamba")


@pytest.mark.parametrize("name", PARTIAL)
def test_what_yarn_scales_is_only_what_turns(name: str, tmp_path: Path) -> None:
    """The elements of a head that stay still must be left alone, whether a norm comes between or not."""
    family = next(family for family in all_families() if family.name == name)

    def config() -> Any:
        made = family.config()
        made.rope_parameters = {**made.rope_parameters, **YARN}
        assert made.rope_parameters.get("partial_rotary_factor", 1.0) < 1.0 or name == "bamba"
        return made

    check_logits(Case(replace(family, config=config), tmp_path))


@pytest.mark.parametrize(("max_model_len", "num_tokens"), [(64, 50), (None, 70)])
def test_one_set_of_factors_serves_all_sequences(max_model_len: int | None, num_tokens: int, tmp_path: Path) -> None:
    """transformers changes from the short set to the long one where a sequence outgrows 64 tokens. Here it is the long
    one for all, unless none may outgrow them: then the short one, and what transformers says of such sequences."""
    made = Phi3Config(**TINY, rope_parameters=LONG, original_max_position_embeddings=64)
    reference = save_checkpoint(Family("phi4", lambda: made), tmp_path)
    model: Any = load_model(resolve_model(str(tmp_path)), dtype="float32", device=CPU, max_model_len=max_model_len,
                            page_tokens=4).model  # fmt: skip
    tokens = [(7 * i * i + 3) % 256 for i in range(num_tokens)]
    row, harness = HarnessRow(list(tokens)), PagedHarness(model, num_pages=40, seed=2)
    got = torch.cat([harness.step([(row, count)]) for count in (20, 1, 7, num_tokens - 28)])
    with torch.inference_mode():
        want = reference(torch.tensor([tokens]), use_cache=False).logits[0]
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()
