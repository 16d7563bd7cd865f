"""Taps: the hidden states that enter named layers are those of transformers, whatever runs the layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.layers.step import Step
from quire.layers.taps import Taps
from quire.models.drafting import check_taps
from quire.types import QuireError
from tests.cpu.families.harness import GREEDY, all_families, save_checkpoint
from tests.cpu.rig import load, make_engine, run
from tests.cpu.tiny_models import make_tiny

FAMILIES = {family.name: family for family in all_families()}
LAYERS = (1, 0)
PROMPTS = [[3 + (7 * i + 5 * j) % 250 for j in range(n)] for i, n in enumerate((5, 19))]


class Tapped:
    """A model of which every step is tapped."""

    def __init__(self, model: Any):
        self._model = model
        self.states: dict[int, Tensor] = {}  # position -> [layers * width]

    def forward(self, step: Step, caches: Mapping[str, Tensor]) -> Tensor:
        taps = Taps(LAYERS)
        hidden: Tensor = self._model.forward(replace(step, taps=taps), caches)
        self.states |= dict(zip(step.positions.tolist(), taps.joined(), strict=True))
        return hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "deepseek_v3", "gemma4"])
def test_they_are_those_of_transformers(name: str, kernels: str, tmp_path: Path) -> None:
    reference = save_checkpoint(FAMILIES[name], tmp_path)
    model = load(tmp_path, kernels=kernels)
    tapped = Tapped(model)
    for prompt in PROMPTS:
        tapped.states.clear()
        plain = run(make_engine(model, chunk_tokens=7), [prompt], replace(GREEDY, max_tokens=4))
        tokens = run(make_engine(tapped, chunk_tokens=7), [prompt], replace(GREEDY, max_tokens=4))
        assert tokens == plain
        with torch.inference_mode():
            whole = torch.tensor([prompt + tokens[0][:-1]])
            want = reference(whole, use_cache=False, output_hidden_states=True).hidden_states
        expected = torch.cat([want[layer][0] for layer in LAYERS], dim=1)
        got = torch.stack([tapped.states[position] for position in range(whole.shape[1])])
        assert ((got - expected).abs().max() / expected.abs().max()).item() < 1e-4


def test_layers_out_of_range_are_refused_in_one_line(tmp_path: Path) -> None:
    model = load(make_tiny("llama", tmp_path)[1])
    count = model.num_tapped_layers()
    check_taps(model, [0, count - 1], "head.safetensors")
    last = count - 1
    for wrong in (count, -1):
        with pytest.raises(QuireError, match=rf"head.safetensors reads .* layer {wrong}, .* 0 to {last}") as caught:
            check_taps(model, [0, wrong], "head.safetensors")
        assert "\n" not in str(caught.value) and caught.value.param == "speculate"


def test_a_model_that_gives_none_says_so(tmp_path: Path) -> None:
    save_checkpoint(FAMILIES["qwen3_next"], tmp_path)
    with pytest.raises(QuireError, match="does not give"):
        check_taps(load(tmp_path), [0], "head.safetensors")
