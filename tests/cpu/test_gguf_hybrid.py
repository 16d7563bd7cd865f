"""GGUF files of recurrent hybrids: the same logits as the transformers model they were written from."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.types import QuireError
from tests.cpu.families.decoded import held_bytes
from tests.cpu.families.harness import all_families, save_checkpoint
from tests.cpu.paged_harness import HarnessRow, PagedHarness
from tests.cpu.test_loader_gguf import assert_same_logits, load
from tests.cpu.tiny_gguf_hybrid import write_hybrid

EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}
SCALES = {"embedding_scale": 3.0, "attention.scale": 0.2, "residual_scale": 0.6, "logit_scale": 0.5}
GRANITE = {"attention.head_count_kv": [0, 2], "expert_shared_feed_forward_length": 40, "rope.dimension_count": 16,
           "rope.scaling.finetuned": False, **SCALES}  # fmt: skip
QWEN = {"rope.dimension_count": 4, "attention.recurrent_layers": [True, False], "full_attention_interval": 4}
NEMOTRON = {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5}
# what is written -> (family, changes to its config, architecture, metadata beyond what its sizes give)
FILES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "granite": ("granitemoehybrid", {"num_local_experts": 0}, "granitehybrid", {**GRANITE, "expert_count": 0}),
    "granite experts": ("granitemoehybrid", {}, "granitehybrid", {**GRANITE, "expert_count": 4,
                                                                  "expert_used_count": 2}),
    "bamba": ("bamba", {}, "granitehybrid", {"attention.head_count_kv": [0, 2], "rope.scaling.finetuned": True,
                                             "rope.dimension_count": 8}),
    "falcon_h1": ("falcon_h1", {}, "falcon-h1", {}),
    "falcon_h1 normed": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}, "falcon-h1", {}),
    "nemotron_h": ("nemotron_h", {}, "nemotron_h", {**NEMOTRON, "attention.head_count_kv": [0, 0, 2, 0],
                                                    "feed_forward_length": [0, 96, 0, 0]}),
    "nemotron_h experts": ("nemotron_h experts", {}, "nemotron_h_moe", {
        **NEMOTRON, "attention.head_count_kv": [0, 0, 2], "feed_forward_length": [0, 24, 0], "expert_count": 8,
        "expert_used_count": 2, "expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 40,
        "expert_weights_norm": True, "expert_weights_scale": 2.5, "expert_group_count": 4,
        "expert_group_used_count": 2, "moe_latent_size": 32}),
    "mamba2": ("mamba2", {}, "mamba2", {}),
    "qwen3_next": ("qwen3_next", {"mlp_only_layers": []}, "qwen3next", {
        **QWEN, **EXPERTS, "attention.recurrent_layers": [True, False, True],
        "expert_shared_feed_forward_length": 24}),
    "qwen3_5": ("qwen3_5_text", {"attention_bias": False}, "qwen35", QWEN),
    "qwen3_5 wide": ("qwen3_5_text", {"attention_bias": False, "linear_value_head_dim": 32}, "qwen35", QWEN),
    "qwen3_5 by interval": ("qwen3_5_text", {"attention_bias": False}, "qwen35", {
        "rope.dimension_count": 4, "full_attention_interval": 2}),
    "qwen3_5 experts": ("qwen3_5_moe_text", {}, "qwen35moe", {
        **QWEN, **EXPERTS, "expert_shared_feed_forward_length": 48, "feed_forward_length": None}),
}  # fmt: skip
MATRICES = r"blk\..*\.(attn_(q|k|v|qkv|gate|output)|ssm_(in|out|beta|alpha)|ffn_(gate|up|down)(_exps|_shexp)?)\.weight"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The transformers model of a line of `FILES`."""

    @cache
    def make(name: str) -> Any:
        called, changes, _, _ = FILES[name]
        family = next(family for family in all_families() if family.name == called)
        config = family.config()
        for key, value in changes.items():
            setattr(config, key, value)
        return save_checkpoint(replace(family, config=lambda: config), tmp_path_factory.mktemp("hf"))

    return make


def write(model: Any, name: str, path: Path, more: dict[str, Any] | None = None, **how: Any) -> Path:
    _, _, arch, metadata = FILES[name]
    write_hybrid(model, arch, path / "tiny.gguf", {**metadata, **(more or {})}, **how)
    return path / "tiny.gguf"


@pytest.mark.parametrize("name", FILES)
def test_same_logits_as_transformers(name: str, reference: Any, tmp_path: Path) -> None:
    model = reference(name)
    assert_same_logits(load(write(model, name, tmp_path)), model)


def test_dimensions_of_one_may_be_gone(tmp_path: Path) -> None:
    """Tools that copy files drop them: from the norm of a single group, and from the shared expert's gate."""
    family = next(family for family in all_families() if family.name == "granitemoehybrid")
    config = family.config()
    config.mamba_n_groups = 1
    model = save_checkpoint(replace(family, config=lambda: config), tmp_path / "hf")
    assert_same_logits(load(write(model, "granite experts", tmp_path, trimmed=True)), model)


def test_dimensions_of_one_may_be_gone_from_gates(reference: Any, tmp_path: Path) -> None:
    model = reference("qwen3_5 experts")
    assert_same_logits(load(write(model, "qwen3_5 experts", tmp_path, trimmed=True)), model)


def test_layers_that_draft_are_left_aside(reference: Any, tmp_path: Path) -> None:
    """They stand behind the others. Here: the second of two, so that one is left, which attends to nothing."""
    model = reference("qwen3_5")
    loaded = load(write(model, "qwen3_5", tmp_path, {"nextn_predict_layers": 1}))
    assert [spec.kind for spec in loaded.model.specs] == ["state"]


@pytest.mark.parametrize(("name", "blocks", "near"), [
    ("granite experts", "Q8_0", 0.05),
    ("granite experts", "Q4_1", 0.5),
    ("qwen3_5 wide", "Q8_0", 0.05),
    ("qwen3_5 wide", "Q4_1", 0.5),
    ("nemotron_h", "Q8_0", 0.05),
    ("falcon_h1", "Q8_0", 0.05),
])  # fmt: skip
def test_blocks_stay_close_to_floats(name: str, blocks: str, near: float, reference: Any, tmp_path: Path) -> None:
    """Through merged, scaled and reordered rows."""
    model = reference(name)
    path = write(model, name, tmp_path, types={MATRICES: blocks})
    rng = random.Random(2)
    row = HarnessRow([rng.randrange(256) for _ in range(24)])
    loaded = load(path)
    assert loaded.weights_bytes == held_bytes(loaded.model)
    harness = PagedHarness(loaded.model, num_pages=16, seed=2)
    got = torch.cat([harness.step([(row, count)]) for count in (13, 1, 10)])
    with torch.inference_mode():
        want = model(torch.tensor([row.tokens])).logits[0]
    assert (got - want).abs().mean() <= near * want.abs().mean()
    assert (got - want).abs().max() > 1e-4 * want.abs().max(), "nothing was rounded"


@pytest.mark.parametrize(("name", "key"), [
    ("granite", "ssm.state_size"),
    ("falcon_h1", "ssm.conv_kernel"),
    ("nemotron_h", "feed_forward_length"),
    ("qwen3_5", "ssm.group_count"),
])  # fmt: skip
def test_missing_metadata_is_named(name: str, key: str, reference: Any, tmp_path: Path) -> None:
    with pytest.raises(QuireError, match=rf"lacks {FILES[name][2]}\.{key}") as error:
        load(write(reference(name), name, tmp_path, without=key))
    assert error.value.code == "bad_config"
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "key", "value"), [
    ("granite", "attention.head_count_kv", [0, 2, 0]),
    ("nemotron_h", "feed_forward_length", [0, 96]),
    ("nemotron_h", "feed_forward_length", 96),
    ("qwen3_5", "attention.recurrent_layers", [True]),
    ("qwen3_5", "ssm.inner_size", "wide"),
    ("qwen3_5", "nextn_predict_layers", 3),
])  # fmt: skip
def test_bad_metadata_is_named(name: str, key: str, value: Any, reference: Any, tmp_path: Path) -> None:
    with pytest.raises(QuireError, match=rf"{FILES[name][2]}\.{key}=") as error:
        load(write(reference(name), name, tmp_path, {key: value}))
    assert error.value.code == "bad_config"
