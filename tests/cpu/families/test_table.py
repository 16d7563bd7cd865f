"""docs/models.md is what the registry and the families make of it, and no model type goes unproved."""

from __future__ import annotations

from quire.models.registry import FAMILIES
from tests.cpu.families.harness import CHECKS, all_families, model_type
from tests.cpu.families.table import COLUMNS, PATH, render


def test_every_model_type_is_proved() -> None:
    proved = {model_type(family) for family in all_families()}
    assert set(FAMILIES) <= proved, f"in the registry, but not in tests/cpu/families: {sorted(set(FAMILIES) - proved)}"
    assert len(FAMILIES) >= 20
    assert len(proved - set(FAMILIES)) >= 5, "shown through transformers"


def test_families_have_names_of_their_own() -> None:
    names = [family.name for family in all_families()]
    assert len(names) == len(set(names))


def test_the_table_is_up_to_date() -> None:
    assert PATH.read_text() == render(), "run: python -m tests.cpu.families.table"
    assert {check for checks in COLUMNS.values() for check in checks} == set(CHECKS)
