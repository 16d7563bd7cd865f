"""What a config.json means where it does not name its layers' kinds, or has null for its rope: as in transformers.

Each case saves a tiny random checkpoint of transformers' model and puts the raw fields beside it, as a publisher would
have written them. Ours reads those, and its logits must be the reference's.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cpu import rig
from tests.cpu.families.harness import PAGE_TOKENS, Case, Family, all_families, relative_error, save_checkpoint
from tests.cpu.test_models_defaults import OWN, computed, read

Fields = dict[str, Any]
FAMILIES = {family.name: family for family in all_families()}
TOKENS = [(7 * i * i + 3 * i + 5) % 250 + 3 for i in range(40)]
SWITCHED_ON = {"use_sliding_window": True, "sliding_window": 5}
ALTERNATING = ["full_attention", "sliding_attention"]
ABSENT = object()

# (family, the fields that differ from the family's usual ones)
CASES: list[tuple[str, Mapping[str, Any]]] = [
    ("smollm3", {**SWITCHED_ON, "layer_types": ABSENT}),
    ("smollm3", {**SWITCHED_ON, "layer_types": None}),
    ("smollm3", {"use_sliding_window": False, "sliding_window": 5, "layer_types": None}),
    ("smollm3", {**SWITCHED_ON, "layer_types": None, "no_rope_layers": None, "no_rope_layer_interval": 2}),
    ("qwen2_moe", {**SWITCHED_ON, "layer_types": ABSENT, "max_window_layers": 2}),
    ("qwen2_moe", {**SWITCHED_ON, "layer_types": None, "max_window_layers": 1}),
    ("qwen2_moe", {**SWITCHED_ON, "layer_types": None, "max_window_layers": 0}),
    ("qwen2_moe", {**SWITCHED_ON, "layer_types": ABSENT, "max_window_layers": ABSENT}),
    ("qwen2_moe", {"use_sliding_window": False, "sliding_window": 5, "layer_types": ABSENT}),
    ("qwen3_moe", {**SWITCHED_ON, "layer_types": ABSENT, "max_window_layers": 1}),
    ("qwen3_moe", {**SWITCHED_ON, "layer_types": ALTERNATING}),
    ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 5, "layer_types": ALTERNATING}),
    ("qwen2", {**SWITCHED_ON, "layer_types": ABSENT, "max_window_layers": 1}),
    ("qwen3", {**SWITCHED_ON, "layer_types": None, "max_window_layers": 1}),
    ("mixtral", {"sliding_window": 5, "layer_types": ALTERNATING}),
    ("phi3", {"sliding_window": 5, "layer_types": ALTERNATING}),
    ("starcoder2", {"sliding_window": 5, "layer_types": ALTERNATING}),
    ("ministral3", {"sliding_window": 5, "layer_types": ALTERNATING}),
    ("ministral3", {"rope_parameters": None}),
    ("ministral3", {"rope_parameters": None, "rope_theta": 77.0}),
    ("mellum", {"rope_parameters": None}),
    ("mellum", {"rope_parameters": None, "layer_types": None}),
    ("mellum", {"rope_parameters": None, "rope_theta": 77.0}),
    ("cwm", {"rope_parameters": ABSENT, "rope_theta": 77.0}),
    ("cwm", {"rope_parameters": None}),
]


def name_case(case: tuple[str, Mapping[str, Any]]) -> str:
    words = [f"{key}={'absent' if value is ABSENT else value}" for key, value in case[1].items()]
    return f"{case[0]} {' '.join(words)}"


def changed(family: Family, changes: Mapping[str, Any]) -> Fields:
    fields = {**family.config().to_dict(), **changes}
    return {key: copy.deepcopy(value) for key, value in fields.items() if value is not ABSENT}


@pytest.mark.parametrize("case", CASES, ids=name_case)
def test_logits_are_those_of_transformers(case: tuple[str, Mapping[str, Any]], tmp_path: Path) -> None:
    family, changes = FAMILIES[case[0]], case[1]
    fields = changed(family, changes)
    theirs = type(family.config()).from_dict(copy.deepcopy(fields))
    made = replace(family, config=lambda: copy.deepcopy(theirs))
    ours = Case.__new__(Case)
    ours.family, ours.device, ours.page_tokens, ours.prompts = made, rig.CPU, PAGE_TOKENS, [TOKENS]
    ours.reference = save_checkpoint(made, tmp_path)
    architectures = [type(ours.reference).__name__]
    (tmp_path / "config.json").write_text(json.dumps({**fields, "architectures": architectures}))
    ours.model = rig.load(tmp_path, PAGE_TOKENS)
    got = ours.logits(ours.model, chunk_tokens=16)
    assert relative_error(got, ours.reference_logits(TOKENS)) < 1e-4


def sweeps(fields: Fields) -> Iterator[tuple[str, Fields]]:
    """A field as null; and layers not named, with windows switched on and off."""
    for key in fields:
        if key not in ("model_type", "text_config", "vision_config"):
            yield f"{key}=null", {**fields, key: None}
    if "sliding_window" not in fields or "layer_types" not in fields:
        return
    less = {key: value for key, value in fields.items() if key != "layer_types"}
    for form, base in (("absent", less), ("null", {**less, "layer_types": None})):
        for on in (True, False) if "use_sliding_window" in fields else (None,):
            switch = {} if on is None else {"use_sliding_window": on}
            yield f"layer_types {form}, windows {on}", {**base, **switch, "sliding_window": 5}


@pytest.mark.parametrize("family", OWN, ids=str)
def test_null_and_unnamed_layers_mean_what_transformers_takes_them_for(family: Family) -> None:
    kind, wrong = type(family.config()), []
    for name, fields in sweeps(family.config().to_dict()):
        try:
            theirs = kind.from_dict(copy.deepcopy(fields)).to_dict()
        except Exception:  # transformers refuses it
            continue
        ours, want = read(copy.deepcopy(fields)), read(theirs)
        if ours is not None and want is not None and computed(ours) != computed(want):
            wrong.append(name)
    assert not wrong, f"{wrong} mean something else than in transformers"
