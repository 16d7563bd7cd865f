"""Every model type: a config that names something unknown, or whose sizes do not fit together, or a checkpoint without
some of its experts, ends in one line that names it. Nothing is loaded for that: models are built on meta.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire.files.source import ModelFiles, named_float
from quire.layers.weights import iter_weights
from quire.models.loading.language_model_part import language_model_config
from quire.models.loading.loader import build_model, load_model
from quire.models.registry import FAMILIES as REGISTRY
from quire.types import QuireError
from tests.cpu.families.harness import all_families, model_type

CPU = torch.device("cpu")
Fields = dict[str, Any]
FAMILIES = {model_type(family): family for family in reversed(all_families())}  # one of each type
WITHOUT_ROPE = {"gpt2", "mamba2", "nemotron_h", "opt", "granitemoehybrid", "bloom", "falcon", "jamba", "kimi_linear",
                "rwkv", "zamba2"}  # fmt: skip
OWN_ROPE = {"gptj"}  # which no config names
WITHOUT_ACTIVATION = {"bloom", "lfm2", "lfm2_moe", "rwkv"}  # theirs can't be chosen
OWN_SIZES = {
    "bailing_hybrid",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "jetmoe",
    "kimi_k2",
    "kimi_linear",
    "minicpm3",
    "youtu",
}  # any number of heads makes a layer; the checkpoint's shapes must agree
WITHOUT_HEADS = {"mamba2", "rwkv"}
ACTIVATIONS = ("hidden_act", "hidden_activation", "mlp_hidden_act", "mamba_hidden_act", "activation_function",
               "activation")  # fmt: skip


def fields_of(kind: str) -> Fields:
    config = json.loads(FAMILIES[kind].config().to_json_string(use_diff=False), object_hook=named_float)
    return language_model_config(config) or config


def text_fields(config: Fields) -> Fields:
    return config["text_config"] if isinstance(config.get("text_config"), dict) else config


def refuse(config: Fields) -> str:
    with pytest.raises(QuireError) as caught:
        build_model(config, dtype="float32", device=CPU, page_tokens=16)
    assert caught.value.code in ("bad_config", "unsupported_model")
    said = str(caught.value)
    assert "\n" not in said and len(said) < 1000
    return said


def unknown_rope(text: Fields) -> None:
    ropes = text.get("rope_parameters") or {}
    kinds = {"full_attention", "sliding_attention"} & set(ropes)
    spiral = {"rope_type": "spiral", "short_mscale": 1.0, "long_mscale": 1.0}  # which Phi-MoE asks for before the name
    text["rope_parameters"] = {kind: {**ropes[kind], **spiral} for kind in kinds} if kinds else {**ropes, **spiral}
    text["rope_scaling"] = None


def unknown_activation(text: Fields) -> None:
    text.update({key: "spiral" for key in ACTIVATIONS if key in text})


def unknown_layer(text: Fields) -> None:
    key = "layers_block_type" if "layers_block_type" in text else "layer_types"
    text[key] = ["spiral"] * text.get("num_hidden_layers", 4)


@pytest.mark.parametrize("change", [unknown_rope, unknown_activation, unknown_layer], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_what_is_unknown_is_named(kind: str, change: Callable[[Fields], None]) -> None:
    if change is unknown_rope and kind in WITHOUT_ROPE | OWN_ROPE:
        pytest.skip("nothing turns, or nobody says how")
    if change is unknown_activation and kind in WITHOUT_ACTIVATION:
        pytest.skip("it has no such field")
    config = fields_of(kind)
    change(text_fields(config))
    assert "spiral" in refuse(config)


@pytest.mark.parametrize("changes", [
    {"num_key_value_heads": 3}, {"num_attention_heads": 3}, {"hidden_size": 0}, {"hidden_size": "64"},
    {"num_hidden_layers": 0, "layers_block_type": []},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_sizes_that_make_no_model_are_named(kind: str, changes: Fields) -> None:
    heads = next((name for name in ("num_key_value_heads", "num_attention_heads") if name in changes), None)
    config = fields_of(kind)
    text = text_fields(config)
    if heads is not None and (kind in OWN_SIZES | WITHOUT_HEADS or (heads not in text and "n_head" not in text)):
        pytest.skip("it has no such field")
    if (
        kind in ("gpt2", "gpt_neox", "opt", "persimmon", "bloom", "gptj", "hrm_text")
        and "num_key_value_heads" in changes
    ):
        pytest.skip("all heads have keys and values of their own")
    refuse_fields = {**text, **changes}
    said = refuse({**config, "text_config": refuse_fields} if text is not config else refuse_fields)
    if kind in REGISTRY:  # else transformers says it in its own words
        assert any(word in said for word in ("heads", "hidden_size", "num_hidden_layers", "layers"))


@pytest.mark.parametrize(("rope", "word"), [
    ({"rope_type": "linear", "factor": "four"}, "factor='four'"),
    ({"rope_type": "linear", "factor": -2}, "factor=-2"),
    ({"rope_theta": "x"}, "rope_theta='x'"),
    ({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": "32"}, "original_max_position"),
    ({"rope_type": "yarn", "factor": 4, "beta_fast": -1}, "beta_fast=-1"),
    ({"rope_type": "yarn", "factor": 4, "attention_factor": True}, "attention_factor=True"),
    ({"rope_type": "llama3", "factor": 4, "low_freq_factor": 4}, "can't blend"),
    ("yarn", "rope_parameters='yarn'"),
])  # fmt: skip
def test_numbers_of_rope_are_checked(rope: Any, word: str) -> None:
    assert word in refuse({**fields_of("llama"), "rope_parameters": rope})


@pytest.mark.parametrize(("kind", "changes"), [
    ("llama", {"layer_types": 5}), ("qwen3_moe", {"mlp_only_layers": 3}), ("qwen3_next", {"rope_parameters": [1]}),
    ("ernie4_5_moe", {"moe_layer_start_index": "one"}), ("ernie4_5_moe", {"moe_layer_end_index": 9}),
    ("smollm3", {"no_rope_layers": 7}), ("mamba2", {"time_step_limit": 4}), ("llama", {"quantization_config": "fp8"}),
    ("llama", {"model_type": ["llama"]}), ("deepseek_v3", {"n_shared_experts": -1}),
    ("deepseek_v3", {"n_shared_experts": "x"}), ("gemma4_text", {"hidden_size_per_layer_input": -4}),
    ("gemma4_text", {"final_logit_softcapping": 0}), ("gemma2", {"attn_logit_softcapping": -1}),
    ("gemma2", {"query_pre_attn_scalar": -4}), ("granite", {"logits_scaling": 0}),
    ("olmo", {"clip_qkv": 0}), ("olmoe", {"clip_qkv": "8"}), ("granitemoeshared", {"shared_intermediate_size": -8}),
    ("granitemoe", {"num_experts_per_tok": 7}), ("granitemoe", {"residual_multiplier": "half"}),
    ("granitemoe", {"num_local_experts": 0}), ("olmo_hybrid", {"rope_parameters": [1]}),
    ("granite_swa", {"layer_rope_theta": [10000.0]}), ("granite_swa", {"layer_rope_theta": 10000.0}),
    ("granite_swa", {"layer_rope_theta": [0, -1, 100, 100]}), ("granite_swa", {"layer_rope_theta": ["x", 0, 0, 0]}),
    ("granite_swa", {"sliding_window": 0}), ("hyperclovax", {"logits_scaling": 0}),
    ("hyperclovax", {"use_post_norm": "yes"}), ("jais2", {"layer_norm_eps": "x"}),
    ("vaultgemma", {"query_pre_attn_scalar": -4}), ("vaultgemma", {"attn_logit_softcapping": 0}),
    ("flex_olmo", {"num_experts_per_tok": 9}), ("flex_olmo", {"norm_topk_prob": 1}), ("hy_v3", {"mlp_bias": True}),
    ("hy_v3", {"num_shared_experts": -1}), ("hy_v3", {"router_scaling_factor": "x"}),
    ("hy_v3", {"mlp_layer_types": ["dense"]}), ("mellum", {"mlp_layer_types": ["thick"] * 3}),
    ("mellum", {"sliding_window": -1}), ("granitemoe_swa", {"layer_rope_theta": [0]}),
    ("granitemoe_swa", {"shared_intermediate_size": -8}),
    ("minicpm3", {"dim_model_base": 0}), ("minicpm3", {"scale_depth": "deep"}), ("minicpm3", {"v_head_dim": 0}),
    ("minicpm3", {"q_lora_rank": None, "attention_bias": True}), ("minicpm3", {"mlp_bias": "no"}),
    ("youtu", {"qk_rope_head_dim": 7}), ("youtu", {"kv_lora_rank": "x"}), ("youtu", {"rope_interleave": 2}),
    ("afmoe", {"num_dense_layers": 4}), ("afmoe", {"route_scale": "x"}), ("afmoe", {"global_attn_every_n_layers": 0}),
    ("afmoe", {"mup_enabled": 1}), ("aria_text", {"moe_topk": 7}), ("aria_text", {"moe_num_shared_experts": 0}),
    ("cohere2_moe", {"num_shared_experts": -1}), ("cohere2_moe", {"rms_norm_eps": "x"}),
    ("cohere2_moe", {"layer_types": None, "sliding_window_pattern": 0}),
    ("cohere2_moe", {"layer_types": None, "first_k_dense_replace": 9}),
    ("cohere2_moe", {"mlp_layer_types": None, "first_k_dense_replace": "one"}),
    ("gpt_neox", {"rotary_pct": 3.0, "rope_parameters": None}), ("gpt_neox", {"use_parallel_residual": "yes"}),
    ("gpt_neox", {"rotary_emb_base": -1, "rope_parameters": None}), ("gpt_neox", {"layer_norm_eps": "x"}),
    ("persimmon", {"qk_layernorm": 1}), ("persimmon", {"partial_rotary_factor": 0.2, "rope_parameters": None}),
    ("hunyuan_v1_moe", {"moe_topk": [2, 3]}), ("hunyuan_v1_moe", {"moe_topk": []}), ("hunyuan_v1_moe", {"moe_topk": 7}),
    ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "dynamic", "alpha": -1.0}}),
    ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "dynamic", "alpha": "x"}}),
    ("kimi_linear", {"num_experts_per_token": 9}), ("kimi_linear", {"linear_attn_config": {"head_dim": "wide"}}),
], ids=str)  # fmt: skip
def test_what_no_one_foresaw_ends_in_one_line_too(kind: str, changes: Fields) -> None:
    refuse({**fields_of(kind), **changes})


@pytest.mark.parametrize(("kind", "changes"), [
    *((kind, {"use_bidirectional_attention": True}) for kind in ("gemma", "gemma2", "gemma3_text")),
    ("gemma4_text", {"use_bidirectional_attention": "all"}),
    ("cohere2_moe", {"expert_selection_fn": "argmax"}), ("cohere2_moe", {"shared_expert_combination_strategy": "max"}),
    ("aria_text", {"mlp_bias": True}), ("hy_v3", {"mlp_bias": True}), ("afmoe", {"attention_bias": True}),
    ("afmoe", {"score_func": "softmax"}),
], ids=str)  # fmt: skip
def test_variants_that_are_not_built_are_refused_by_name(kind: str, changes: Fields) -> None:
    """As docs/models.md says."""
    assert all(field in refuse({**fields_of(kind), **changes}) for field in changes)


def test_a_gemma_whose_images_alone_look_ahead_is_not_refused() -> None:
    fields = {**fields_of("gemma4_text"), "use_bidirectional_attention": "vision"}
    build_model(fields, dtype="float32", device=CPU, page_tokens=16)


def test_what_is_quantized_as_a_whole_is_so_in_part() -> None:
    """Of text and images, with the method said of the whole."""
    family = next(family for family in all_families() if family.name == "gemma3 of text and images")
    config = json.loads(family.config().to_json_string(use_diff=False), object_hook=named_float)
    part = language_model_config({**config, "quantization_config": {"quant_method": "hqq"}})
    assert part is not None and "is quantized with hqq" in refuse(part)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints without some of their experts


def with_experts() -> list[str]:
    return [kind for kind in sorted(FAMILIES) if any("expert" in name for name in tensor_shapes(kind))]


def tensor_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    model, _ = build_model(fields_of(kind), dtype="float32", device=CPU, page_tokens=16)
    return {part.name: part.shape for _, _, weight in iter_weights(model) for part in weight.parts}


@pytest.mark.parametrize("kind", with_experts())
def test_missing_experts_are_named(kind: str, tmp_path: Path) -> None:
    shapes = tensor_shapes(kind)
    gone = [name for name in shapes if ".experts.1." in name]
    cut = (
        [name for name in shapes if name.endswith(("experts.gate_up_proj", "input_linear.weight", "fc1.weight"))]
        if not gone
        else []
    )
    cut = [name for name in cut if len(shapes[name]) == 3]
    assert gone or cut
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items() if name not in gone}
    tensors.update({name: tensors[name][:-1].clone() for name in cut})
    save_file(tensors, tmp_path / "model.safetensors")
    files = ModelFiles("folder", tmp_path, "tiny", fields_of(kind))
    with pytest.raises(QuireError) as caught:
        load_model(files, dtype="float32", device=CPU, max_model_len=None, page_tokens=16)
    said = str(caught.value)
    assert caught.value.code == "bad_weights" and "\n" not in said
    assert ("lacks expert 1 of" in said) if gone else (cut[0] in said and "wrong shape" in said), said
