"""Every causal model type of the installed transformers that has no file of ours gives transformers' own logits and
tokens, or is refused in one line. `pytest -m slow tests/cpu/families/test_more_types.py`."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire.types import QuireError
from tests.cpu.families.checks import check_chunks, check_logits, check_warm_prefix
from tests.cpu.families.harness import Case, Family, save_checkpoint
from tests.cpu.families.more_types import CONFIG_MAPPING, RIGHT, WITH_EYES, other_types, small_config, small_with_eyes
from tests.cpu.families.others import draw_ln
from tests.cpu.paged_harness import assert_equals_transformers
from tests.cpu.rig import load

MOST_PARAMETERS = 60_000_000

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model_type", other_types())
def test_it_is_right_or_refused(model_type: str, tmp_path: Path) -> None:
    config = _config_that_makes_a_model(model_type)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slower
        try:
            case = Case(Family(model_type, lambda: config, draw_ln), tmp_path)
            check_logits(case)
        except QuireError as refused:
            assert model_type not in RIGHT, refused
            assert refused.code in ("unsupported_model", "bad_config") and "\n" not in str(refused)
            return
        check_chunks(case)
        check_warm_prefix(case)


@pytest.mark.parametrize("model_type", [kind for kind in WITH_EYES if kind in CONFIG_MAPPING])
def test_the_language_model_of_one_with_eyes_is_right(model_type: str, tmp_path: Path) -> None:
    """By the names it is published with."""
    model = save_with_eyes(model_type, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slower
        assert_equals_transformers(load(tmp_path, page_tokens=4), partial(model, use_cache=False))


def save_with_eyes(model_type: str, folder: Path) -> Any:
    kinds = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    family = Family(model_type, lambda: small_with_eyes(model_type), draw_ln, kinds[model_type])
    return save_checkpoint(family, folder)


def test_what_was_right_is_still_looked_at() -> None:
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert {kind for kind in RIGHT if kind in known} <= set(other_types())


def _config_that_makes_a_model(model_type: str) -> Any:
    """Skips what these sizes make no small model of: nothing is said of it then."""
    try:
        config = small_config(model_type)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:  # model code of transformers can raise anything
        assert model_type not in RIGHT, error
        pytest.skip(f"no small {model_type}: {error!r:.200}")
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > MOST_PARAMETERS:
        pytest.skip(f"a {model_type} of these sizes has {count:,} parameters")
    return config
