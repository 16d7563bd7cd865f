"""Rope in combinations that no published config has, or that the families' tiny ones leave out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.families.checks import check_logits
from tests.cpu.families.harness import Case, all_families

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
