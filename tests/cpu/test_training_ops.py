"""The TRAIN row of the ops table: a dense model's gradients are those of transformers, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from quire.files.source import resolve_model
from quire.kernels.table import TRAIN
from quire.layers.step import PagedInputs, Step
from quire.layers.weights import Weight, iter_weights
from quire.models.loading.loader import build_model, read_config
from quire.models.loading.shards import SafetensorsCheckpoint
from quire.models.loading.sources import CheckpointFill, fill_model
from tests.cpu.families.harness import VOCAB, all_families, save_checkpoint

CPU = torch.device("cpu")
COUNTS = [7, 12, 1]


def sequences_step(specs: list[Any], tokens: torch.Tensor) -> tuple[Step, dict[str, torch.Tensor]]:
    """A step of whole sequences, and caches without a page."""
    starts = torch.tensor([0, *torch.tensor(COUNTS).cumsum(0)], dtype=torch.int32)
    positions = torch.cat([torch.arange(count) for count in COUNTS])
    nothing = torch.empty(0, dtype=torch.int64)
    groups: dict[str, Any] = {spec.group: PagedInputs(torch.empty(len(COUNTS), 0), nothing) for spec in specs}
    caches = {spec.group: torch.empty(len(spec.layers), 2, 0, 0, *spec.shape) for spec in specs}
    lens = torch.tensor(COUNTS, dtype=torch.int32)
    return Step(tokens, positions, starts, lens, nothing, groups, COUNTS, COUNTS), caches


def expected_gradients(reference: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    reference.zero_grad()
    for parameter in reference.parameters():
        parameter.requires_grad_(True)
    logits = torch.cat([reference(row[None]).logits[0] for row in tokens.split(COUNTS)])
    loss = functional.cross_entropy(logits, tokens.roll(-1))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}


def whole_gradient(weight: Weight, found: dict[str, torch.Tensor]) -> torch.Tensor:
    """The gradient of a merged weight, from those of the checkpoint's tensors."""
    whole = torch.empty(weight.shape)
    for part in weight.parts_in({name: tuple(each.shape) for name, each in found.items()}):
        is_ordered = part.form is not None and hasattr(part.form, "order")
        grad = found[part.name]
        whole[part.start : part.stop] = part.form(grad) if is_ordered and part.form is not None else grad  # type: ignore[operator]
    return whole


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3"])
def test_gradients_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    family = next(family for family in all_families() if family.name == name)
    reference = save_checkpoint(family, tmp_path)
    files = resolve_model(str(tmp_path))

    def build() -> Any:
        return build_model(read_config(files), dtype="float32", device=CPU, page_tokens=4, ops=TRAIN)[0]

    model, described = build(), build()
    shards = SafetensorsCheckpoint([tmp_path / "model.safetensors"], str(tmp_path))
    fill_model(model, CheckpointFill(model, shards), CPU, lambda _: None)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    tokens = torch.randint(3, VOCAB, (sum(COUNTS),), generator=torch.Generator().manual_seed(3))
    step, caches = sequences_step(model.specs, tokens)
    loss = functional.cross_entropy(model.logits(model.forward(step, caches)), tokens.roll(-1))
    loss.backward()
    want_loss, want = expected_gradients(reference, tokens)
    assert torch.allclose(loss.detach(), want_loss, rtol=1e-5)
    got: dict[Any, torch.Tensor] = {}
    weights = {weight.kept_as: weight for _, _, weight in iter_weights(described)}
    paths = {id(module): path for path, module in described.named_modules()}
    modules = dict(model.named_modules())
    for module, field, weight in iter_weights(described):
        gradient = getattr(modules[paths[id(module)]], field).grad
        if gradient is not None:  # a tied weight has one from each use
            got[weight.kept_as] = got.get(weight.kept_as, 0) + gradient
    assert len(got) == len(weights)
    for key, gradient in got.items():
        expected = whole_gradient(weights[key], want)
        assert expected.abs().max() > 0
        assert (gradient - expected).abs().max() <= 2e-4 * expected.abs().max(), weights[key].parts[0].name


def test_rows_that_began_earlier_are_refused() -> None:
    with pytest.raises(ValueError, match="whole sequence"):
        TRAIN.plan_attention(torch.empty(1, 0), torch.tensor([5]), [1], [6], 4, None, torch.float32)
