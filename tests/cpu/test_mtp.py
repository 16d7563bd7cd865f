"""Heads for multi-token prediction, in each published form: loaded, right, and without any effect on the tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, QuireError, SamplingParams
from quire.engine.costs.step_costs import StepCosts
from quire.engine.speculation.build import make_drafter
from quire.files.source import resolve_model
from quire.models.loading.head import build_head, fill_head
from quire.startup.draft_network import LoadedDraft
from quire.types import Request
from tests.cpu.mtp_checkpoints import FORMS, PlainHead, save_with_head
from tests.cpu.rig import CPU, load, make_engine, run_deltas
from tests.pure.drafting import RandomDrafter

PROMPTS = [[(7 * i + 11 * j * j) % 250 + 3 for j in range(n)] for i, n in enumerate((1, 2, 5, 16, 17, 30, 41))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, seed=3, top_p=0.95)


class Loaded:
    """A checkpoint of one form with its model and head."""

    def __init__(self, name: str, folder: Path):
        self.plain: PlainHead = save_with_head(FORMS[name], folder)
        self.folder = folder
        self.model: Any = load(folder)

    def draft(self) -> LoadedDraft:
        files = resolve_model(str(self.folder))
        head = build_head(files, self.model, dtype="float32", device=CPU, page_tokens=4)
        assert head is not None
        return LoadedDraft("mtp", head, fill_head(head, files, CPU, random_weights=False))


@pytest.fixture(scope="module", params=FORMS)
def loaded(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded(request.param, tmp_path_factory.mktemp("mtp"))


def tokens_of(engine: Any, params: SamplingParams, prompts: Sequence[list[int]] = PROMPTS) -> list[list[int]]:
    each = [replace(params, seed=i) for i in range(len(prompts))]
    return [[t for delta in one for t in delta.token_ids] for one in run_deltas(engine, prompts, each, check=False)]


class Comparing(RandomDrafter):
    """Compares everything that the device proposes with the plain mathematics, and verifies some of it."""

    def __init__(self, plain: PlainHead):
        super().__init__(random.Random(4), waits=1.0, proposing=True, silent=0.1, longest=3, right=0.0)
        self._plain = plain
        self.num_compared = 0

    def proposed(self, request: Request, drafts: list[int], chances: Sequence[float]) -> None:
        super().proposed(request, drafts, chances)
        assert all(0 < chance <= 1 for chance in chances)
        if self._rng.random() < 0.25:
            self.num_compared += 1
            assert drafts == self._plain.drafts(request.tokens, len(drafts)), len(request.tokens)


@pytest.mark.parametrize("depth", [1, 2])
def test_proposals_are_those_of_the_plain_mathematics(loaded: Loaded, depth: int) -> None:
    """In chunks, beside other rows, and behind accepted and rejected drafts."""
    drafter = Comparing(loaded.plain)
    engine = make_engine(loaded.model, draft=loaded.draft(), drafter=drafter, depth=depth, late=depth == 2,
                         chunk_tokens=7, prefix_cache=False)  # fmt: skip
    assert tokens_of(engine, GREEDY) == tokens_of(make_engine(loaded.model), GREEDY)
    assert drafter.num_compared > 10 and drafter.num_drafts > drafter.num_accepted


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_tokens_are_those_without_the_head(loaded: Loaded, params: SamplingParams, monkeypatch: Any) -> None:
    """Over a warm prefix, swapped out and in, at depths 1 and 2."""
    monkeypatch.setattr(StepCosts, "seconds", lambda self, num_tokens, num_keys: 1 + 0.01 * num_tokens)
    expected = tokens_of(make_engine(loaded.model), params)
    pushed: dict[str, Any] = {"max_rows": 3, "num_pages": 40, "preemption": "swap", "depth": 2, "late": True}
    for how in ({"chunk_tokens": 7}, pushed):
        engine = make_engine(loaded.model, draft=loaded.draft(), drafter=make_drafter("mtp", "mtp"), **how)
        for _ in range(2):
            assert tokens_of(engine, params) == expected
        drafter = engine.scheduler._drafts.drafter
        assert drafter is not None and sum(drafter.stats().by_name("mtp").verified) >= 5
        engine.scheduler.check()


def test_it_is_found_by_the_setting(tmp_path: Path) -> None:
    """`mtp` asks for it, `auto` takes it where there is one."""
    save_with_head(FORMS["mimo"], tmp_path)
    groups = {}
    for speculate in ("off", "mtp", "suffix,mtp", "auto", "suffix"):
        with LLM(str(tmp_path), dtype="float32", speculate=speculate) as llm:
            (output,) = llm.generate([PROMPTS[3]], GREEDY)
            groups[speculate] = output.token_ids, [spec.group for spec in llm._parts.memory.specs]
    assert len({tuple(tokens) for tokens, _ in groups.values()}) == 1
    assert {name for name, (_, found) in groups.items() if "mtp" in found} == {"mtp", "suffix,mtp", "auto"}


def _changed(folder: Path, change: Any) -> Path:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def test_a_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    save_with_head(FORMS["mimo"], tmp_path)
    _changed(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if "mtp" in name])
    with pytest.raises(QuireError, match=r"no layer for multi-token prediction: there is no tensor model\.mtp_layers"):
        LLM(str(tmp_path), dtype="float32", speculate="mtp")
    with LLM(str(tmp_path), dtype="float32", speculate="auto") as llm:
        assert len(llm.generate([PROMPTS[3]], GREEDY)[0].token_ids) == 20


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next", "mimo"])
def test_a_head_for_another_width_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    save_with_head(FORMS[name], tmp_path)
    project = f"{FORMS[name].names['project']}.weight"
    _changed(tmp_path, lambda tensors: tensors.update({project: torch.zeros(32, 64)}))
    with pytest.raises(QuireError, match=r"wrong shape: \[32, 64\] where the config requires \[64, 128\]") as caught:
        LLM(str(tmp_path), dtype="float32", speculate="mtp")
    assert "\n" not in str(caught.value) and project in str(caught.value)


def test_a_head_with_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    save_with_head(FORMS["qwen3_5_text"], tmp_path)
    _changed(tmp_path, lambda tensors: tensors.pop("mtp.layers.0.self_attn.k_proj.weight"))
    with pytest.raises(QuireError, match=r"lacks tensor mtp\.layers\.0\.self_attn\.k_proj\.weight"):
        LLM(str(tmp_path), dtype="float32", speculate="mtp")


def test_tables_that_only_repeat_the_models_are_shared(tmp_path: Path) -> None:
    for name, is_shared in (("deepseek_v3", True), ("deepseek_v3, own tables", False)):
        loaded = Loaded(name, tmp_path / str(is_shared))
        head: Any = loaded.draft().network
        assert (head.embedding is None) == (head.head is None) == is_shared
        assert json.loads((loaded.folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
