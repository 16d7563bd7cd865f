"""docs/models.md is what the registry and the families make of it, and no model type goes unproved."""

from __future__ import annotations

import torch

from quire.models.loading.language_model_part import language_model_config
from quire.models.loading.loader import build_model
from quire.models.registry import FAMILIES
from tests.cpu.families.checks import CHECKS
from tests.cpu.families.harness import all_families, model_type
from tests.cpu.families.table import COLUMNS, PATH, render


def test_every_model_type_is_proved() -> None:
    proved = {model_type(family) for family in all_families()}
    assert set(FAMILIES) <= proved, f"in the registry, but not in tests/cpu/families: {sorted(set(FAMILIES) - proved)}"
    assert len(FAMILIES) >= 20
    assert len(proved - set(FAMILIES)) >= 5, "shown through transformers"


def test_families_have_names_of_their_own() -> None:
    names = [family.name for family in all_families()]
    assert len(names) == len(set(names))


WINDOWED = {"afmoe", "cohere2", "cohere2_moe", "cwm", "dots1", "exaone4", "exaone_moe", "gemma2", "gemma3_text",
            "gemma4_text", "gpt_oss", "granite_swa", "granitemoe_swa", "mellum", "ministral", "mistral", "olmo3",
            "phi3", "phimoe", "qwen2", "recurrent_gemma", "starcoder2", "vaultgemma"}  # fmt: skip


def test_windows_are_proved_where_there_are_any() -> None:
    """`check_memory` also proves that pages which fell out of a window are given back: of these models at least."""
    found = set()
    for family in all_families():
        config = family.config().to_dict()
        text = language_model_config(config) or config
        model, _ = build_model(text, dtype="float32", device=torch.device("cpu"), page_tokens=16)
        if any(spec.window is not None for spec in model.specs):
            assert "memory" not in family.without
            found.add(model_type(family))
    assert found == WINDOWED


def test_the_table_is_up_to_date() -> None:
    assert PATH.read_text() == render(), "run: python -m tests.cpu.families.table"
    assert {check for checks in COLUMNS.values() for check in checks} == set(CHECKS)
