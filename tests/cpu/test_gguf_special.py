"""GGUF files of gpt-oss, DeepSeek and its kin, and Gemma 4: the same logits as the models they were written from."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.files.gguf import open_gguf
from quire.models.gguf.checkpoint import read_config
from quire.types import QuireError
from tests.cpu.families.harness import all_families, save_checkpoint
from tests.cpu.paged_harness import HarnessRow, PagedHarness
from tests.cpu.special_gguf import write_special
from tests.cpu.test_loader_gguf import assert_same_logits, load


def make(name: str, folder: Path, **changes: Any) -> Any:
    """The tiny model of a test family, with some fields of its config changed."""
    family = next(family for family in all_families() if family.name == name)
    config = family.config()
    for key, value in changes.items():
        setattr(config, key, value)
    return save_checkpoint(replace(family, config=lambda: config), folder)


def test_gpt_oss(tmp_path: Path) -> None:
    reference = make("gpt_oss", tmp_path / "hf")
    write_special(reference, "gpt-oss", tmp_path / "tiny.gguf")
    loaded = load(tmp_path / "tiny.gguf")
    assert {spec.window for spec in loaded.model.specs} == {8, None}
    assert_same_logits(loaded, reference)


@pytest.mark.parametrize("name", ["gemma4", "gemma4 keys as values", "gemma4 experts"])
@pytest.mark.parametrize("tied", [False, True])
def test_gemma4(name: str, tied: bool, tmp_path: Path) -> None:
    reference = make(name, tmp_path / "hf", tie_word_embeddings=tied)
    write_special(reference, "gemma4", tmp_path / "tiny.gguf")
    assert_same_logits(load(tmp_path / "tiny.gguf"), reference)


def test_gemma4_with_keys_that_nobody_reads(tmp_path: Path) -> None:
    """Layers that share the keys of others may have some of their own in a file, as in published checkpoints."""
    reference = make("gemma4", tmp_path / "hf")
    attention = reference.model.layers[5].self_attn
    attention.k_proj, attention.k_norm = torch.nn.Linear(64, 64, bias=False), torch.nn.RMSNorm(32)
    attention.v_proj = torch.nn.Linear(64, 64, bias=False)
    write_special(reference, "gemma4", tmp_path / "tiny.gguf")
    assert_same_logits(load(tmp_path / "tiny.gguf"), reference)


def make_deepseek(name: str, folder: Path, **changes: Any) -> Any:
    """A file has no room for a scale of angles: it is one where both weights of the magnitude are equal, as they are
    in every published model."""
    family = next(family for family in all_families() if family.name == name)
    rope = dict(family.config().rope_parameters)
    if "mscale" in rope:
        changes["rope_parameters"] = {**rope, "mscale": rope["mscale_all_dim"]}
    return make(name, folder, **changes)


@pytest.mark.parametrize("arch", ["deepseek2", "deepseek2 older"])
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"])
def test_deepseek(name: str, arch: str, tmp_path: Path) -> None:
    reference = make_deepseek(name, tmp_path / "hf")
    write_special(reference, arch, tmp_path / "tiny.gguf")
    assert_same_logits(load(tmp_path / "tiny.gguf"), reference)


@pytest.mark.parametrize(
    ("name", "tokenizer", "found"),
    [
        ("deepseek_v2", "deepseek-llm", "deepseek_v2"),
        ("deepseek_v3", "deepseek-v3", "deepseek_v3"),
        ("kimi_k2", "kimi-k2", "kimi_k2"),
        ("glm4_moe_lite", "glm4", "glm4_moe_lite"),
    ],
)
def test_which_of_deepseeks_kin_it_is(name: str, tokenizer: str, found: str, tmp_path: Path) -> None:
    write_special(make_deepseek(name, tmp_path / "hf"), "deepseek2", tmp_path / "tiny.gguf")
    file = open_gguf(tmp_path / "tiny.gguf")
    assert (
        read_config(replace(file, metadata={**file.metadata, "tokenizer.ggml.pre": tokenizer}))["model_type"] == found
    )


def test_layers_that_draft_are_passed_over(tmp_path: Path) -> None:
    reference = make_deepseek("glm4_moe_lite", tmp_path / "hf")
    tensors = reference.state_dict()
    drafting = {
        name.replace("layers.1.", "layers.2."): tensor for name, tensor in tensors.items() if "layers.1." in name
    }
    drafting["blk.2.nextn.eh_proj.weight"] = torch.zeros(64, 128)
    both = SimpleNamespace(config=reference.config, state_dict=lambda: {**tensors, **drafting})
    metadata = {"block_count": 3, "nextn_predict_layers": 1}
    write_special(both, "deepseek2", tmp_path / "tiny.gguf", metadata=metadata)
    assert_same_logits(load(tmp_path / "tiny.gguf"), reference)


def assert_blocks_are_what_they_stand_for(reference: Any, arch: str, folder: Path, types: dict[str, str]) -> None:
    """The logits of a file in blocks are those of the numbers in them, but for the rounding of activations."""
    write_special(reference, arch, folder / "blocks.gguf", types=types)
    write_special(reference, arch, folder / "floats.gguf", types=types, decoded=True)
    rng = random.Random(3)
    tokens = [rng.randrange(256) for _ in range(24)]
    got, want = (
        PagedHarness(load(folder / f"{name}.gguf").model, num_pages=16, seed=2).step([(HarnessRow(tokens), 24)])
        for name in ("blocks", "floats")
    )
    assert torch.linalg.vector_norm(got - want) < 1e-3 * torch.linalg.vector_norm(want)


def test_gpt_oss_with_experts_in_four_bits(tmp_path: Path) -> None:
    types = {r".*_exps\.weight": "MXFP4", r".*\.attn_(q|k|v|output)\.weight|(token_embd|output)\.weight": "Q8_0"}
    assert_blocks_are_what_they_stand_for(make("gpt_oss", tmp_path / "hf"), "gpt-oss", tmp_path, types)


@pytest.mark.parametrize("name", ["gemma4", "gemma4 experts"])
def test_gemma4_in_blocks(name: str, tmp_path: Path) -> None:
    types = {r".*(_exps|token_embd|attn_[qkv]|attn_output|ffn_(gate|up|down))\.weight": "Q8_0"}
    sizes = {"hidden_size_per_layer_input": 32} if name == "gemma4" else {}
    assert_blocks_are_what_they_stand_for(make(name, tmp_path / "hf", **sizes), "gemma4", tmp_path, types)


def test_deepseek_in_blocks(tmp_path: Path) -> None:
    sizes = {"qk_nope_head_dim": 32, "qk_head_dim": 48, "v_head_dim": 32, "q_lora_rank": 32}
    reference = make("deepseek_v3", tmp_path / "hf", **sizes, moe_intermediate_size=32)
    types = {
        r".*(_exps|_shexp|_embd|attn_(q|k|v)_b|attn_q_a|attn_kv_a_mqa|attn_output|ffn_(gate|up|down))\.weight": "Q8_0"
    }
    assert_blocks_are_what_they_stand_for(reference, "deepseek2", tmp_path, types)


# family, architecture, metadata (None: it is left out), the key that the error names
BAD = [
    ("gpt_oss", "gpt-oss", {"expert_count": None}, "expert_count"),
    ("gpt_oss", "gpt-oss", {"expert_feed_forward_length": None}, "expert_feed_forward_length"),
    ("gpt_oss", "gpt-oss", {"expert_feed_forward_length": [96, 32]}, "expert_feed_forward_length"),
    ("gpt_oss", "gpt-oss", {"attention.sliding_window": "wide"}, "attention.sliding_window"),
    ("gemma4", "gemma4", {"attention.sliding_window_pattern": None}, "attention.sliding_window_pattern"),
    ("gemma4", "gemma4", {"attention.sliding_window_pattern": [True] * 5}, "attention.sliding_window_pattern"),
    ("gemma4", "gemma4", {"attention.head_count_kv": ["two"] * 6}, "attention.head_count_kv"),
    ("gemma4", "gemma4", {"attention.shared_kv_layers": 7}, "attention.shared_kv_layers"),
    ("gemma4", "gemma4", {"attention.key_length_swa": None}, "attention.key_length_swa"),
    ("gemma4", "gemma4", {"feed_forward_length": [96, 96, 96, 96, 96, 192]}, "feed_forward_length"),
    ("deepseek_v3", "deepseek2", {"attention.kv_lora_rank": None}, "attention.kv_lora_rank"),
    ("deepseek_v3", "deepseek2", {"attention.q_lora_rank": "some"}, "attention.q_lora_rank"),
    ("deepseek_v3", "deepseek2", {"attention.key_length_mla": 16}, "attention.key_length_mla"),
    ("deepseek_v3", "deepseek2", {"attention.value_length_mla": None}, "attention.value_length_mla"),
    ("deepseek_v3", "deepseek2", {"attention.temperature_scale": 0.1}, "attention.temperature_scale"),
    ("deepseek_v3", "deepseek2", {"expert_count": None}, "expert_count"),
    ("deepseek_v3", "deepseek2", {"expert_gating_func": 3}, "expert_gating_func"),
    ("deepseek_v3", "deepseek2", {"expert_weights_norm": 1}, "expert_weights_norm"),
    ("deepseek_v2", "deepseek2", {"expert_weights_norm": True}, "expert_weights_norm"),
    ("deepseek_v3", "deepseek2", {"expert_group_used_count": None}, "expert_group_used_count"),
    ("deepseek_v3", "deepseek2", {"nextn_predict_layers": 2}, "nextn_predict_layers"),
]


@pytest.mark.parametrize(("name", "arch", "metadata", "key"), BAD, ids=lambda part: str(part)[:40])
def test_bad_metadata_is_named(name: str, arch: str, metadata: dict[str, Any], key: str, tmp_path: Path) -> None:
    reference = make(name, tmp_path / "hf")
    write_special(reference, arch, tmp_path / "tiny.gguf", metadata=metadata)
    with pytest.raises(QuireError) as caught:
        load(tmp_path / "tiny.gguf")
    assert f"{arch}.{key}" in str(caught.value) and "\n" not in str(caught.value)
