"""Tiny GGUF files of the architectures that keep tensors otherwise than checkpoints do: gpt-oss, DeepSeek, Gemma 4.

`write_special` lays a transformers model's tensors out as converters do, under their names, and has `tiny_gguf` write
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import torch
from torch import Tensor

from tests.cpu.tiny_gguf import gguf_name, write_gguf

Named = Iterator[tuple[str, Tensor]]


def write_special(model: Any, arch: str, path: Path, types: dict[str, str] | None = None,
                  metadata: dict[str, Any] | None = None, decoded: bool = False) -> None:  # fmt: skip
    """`types`: as of `write_gguf`; `metadata`: instead of what a converter writes; None: not that. `decoded`: as the
    floats that tensors of these types stand for."""
    lay_out, describe = ARCHITECTURES[arch]
    arch = arch.split()[0]
    config = SimpleNamespace(**model.config.to_dict())  # the object refuses what differs between layers
    tensors = {
        called: tensor
        for name, tensor in model.state_dict().items()
        for called, tensor in lay_out(name, tensor, config)
    }
    if decoded:
        tensors = {name: _decode(name, tensor, types or {}) for name, tensor in tensors.items()}
        types = {}
    laid_out = SimpleNamespace(config=config, state_dict=lambda: tensors)
    given = {**describe(config, tensors), **(metadata or {})}
    named = {f"{arch}.{key}": value for key, value in given.items() if value is not None}
    write_gguf(laid_out, arch, path, types=types, metadata=named)


def _decode(name: str, tensor: Tensor, types: dict[str, str]) -> Tensor:
    for pattern, type_name in types.items():
        if re.fullmatch(pattern, name):
            kind = gguf.GGMLQuantizationType[type_name]
            blocks = gguf.quants.quantize(tensor.contiguous().numpy(), kind)
            return torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    return tensor


def _stretched(rope: dict[str, Any]) -> dict[str, Any]:
    if rope["rope_type"] != "yarn":
        return {}
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }


def _gpt_oss(name: str, tensor: Tensor, config: Any) -> Named:
    layer, _, kind = name.rpartition(".")
    block = gguf_name(f"{layer}.").removesuffix("mlp.experts.")
    if kind.startswith("gate_up_proj"):
        tensor = tensor if kind.endswith("_bias") else tensor.transpose(1, 2)
        suffix = "bias" if kind.endswith("_bias") else "weight"
        yield f"{block}ffn_gate_exps.{suffix}", tensor[:, 0::2]
        yield f"{block}ffn_up_exps.{suffix}", tensor[:, 1::2]
    elif kind == "down_proj":
        yield f"{block}ffn_down_exps.weight", tensor.transpose(1, 2)
    elif kind == "down_proj_bias":
        yield f"{block}ffn_down_exps.bias", tensor
    elif kind == "sinks":
        yield gguf_name(name).replace("self_attn.sinks", "attn_sinks.weight"), tensor
    else:
        name = name.replace("post_attention_layernorm", "post_attention_norm")
        yield gguf_name(name).replace("mlp.router", "ffn_gate_inp"), tensor


def _gpt_oss_metadata(config: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.intermediate_size,
        "attention.sliding_window": config.sliding_window,
        **_stretched(config.rope_parameters),
    }


_GEMMA4 = (
    (r"post_attention_layernorm", "post_attention_norm"),
    (r"pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
    (r"post_feedforward_layernorm_([12])", r"post_ffw_norm_\1"),
    (r"pre_feedforward_layernorm", "ffn_norm"),
    (r"post_feedforward_layernorm", "post_ffw_norm"),
    (r"per_layer_input_gate", "inp_gate"),
    (r"post_per_layer_input_norm", "post_norm"),
    (r"model\.per_layer_model_projection", "per_layer_model_proj"),
    (r"model\.per_layer_projection_norm", "per_layer_proj_norm"),
    (r"per_layer_projection", "proj"),
    (r"model\.embed_tokens_per_layer", "per_layer_token_embd"),
    (r"layer_scalar", "layer_output_scale.weight"),
    (r"router\.proj", "ffn_gate_inp"),
    (r"router\.scale", "ffn_gate_inp.scale"),
    (r"router\.per_expert_scale", "ffn_down_exps.scale"),
    (r"experts\.(gate_up|down)_proj", r"ffn_\1_exps.weight"),
)


def _gemma4(name: str, tensor: Tensor, config: Any) -> Named:
    for pattern, replacement in _GEMMA4:
        name = re.sub(pattern, replacement, name)
    name = gguf_name(name)
    yield name, tensor
    if name == f"blk.{config.layer_types.index('full_attention')}.attn_q_norm.weight":
        num_pairs = len(tensor) // 2
        turning = int(num_pairs * config.rope_parameters["full_attention"]["partial_rotary_factor"])
        yield "rope_freqs.weight", torch.tensor([1.0] * turning + [1e30] * (num_pairs - turning))


def _gemma4_metadata(config: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    windows = [kind == "sliding_attention" for kind in config.layer_types]
    num_layers, num_shared = config.num_hidden_layers, config.num_kv_shared_layers
    doubled = [1] * (num_layers - num_shared) + [2 if config.use_double_wide_mlp else 1] * num_shared
    wide, narrow = (config.layer_types.index(f"{kind}_attention") for kind in ("full", "sliding"))
    wide_dim, head_dim = (len(tensors[f"blk.{index}.attn_q_norm.weight"]) for index in (wide, narrow))
    wide_heads, heads = (len(tensors[f"blk.{index}.attn_k.weight"]) for index in (wide, narrow))
    return {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": windows,
        "attention.shared_kv_layers": num_shared,
        "attention.head_count_kv": [heads // head_dim if window else wide_heads // wide_dim for window in windows],
        "attention.key_length": wide_dim,
        "attention.value_length": wide_dim,
        "attention.key_length_swa": head_dim,
        "attention.value_length_swa": head_dim,
        "rope.dimension_count": wide_dim,
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        "feed_forward_length": [factor * config.intermediate_size for factor in doubled],
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "final_logit_softcapping": config.final_logit_softcapping,
        "expert_count": config.num_experts,
        "expert_used_count": config.top_k_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }


_DEEPSEEK = (
    (r"self_attn\.(q_a|q_b|kv_b)_proj", r"attn_\1"),
    (r"self_attn\.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    (r"self_attn\.(q|kv)_a_layernorm", r"attn_\1_a_norm"),
    (r"mlp\.shared_experts\.(gate|up|down)_proj", r"ffn_\1_shexp"),
    (r"mlp\.gate\.e_score_correction_bias", "exp_probs_b.bias"),
    (r"mlp\.experts\.down_proj", "ffn_down_exps.weight"),
)


def _older_deepseek(name: str, tensor: Tensor, config: Any) -> Named:
    for pattern, replacement in _DEEPSEEK:
        name = re.sub(pattern, replacement, name)
    name = gguf_name(name)
    if not name.endswith("mlp.experts.gate_up_proj"):
        yield name, tensor
        return
    for kind, part in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
        yield name.replace("mlp.experts.gate_up_proj", f"ffn_{kind}_exps.weight"), part


def _deepseek(name: str, tensor: Tensor, config: Any) -> Named:
    for called, its in _older_deepseek(name, tensor, config):
        if called.endswith("attn_kv_b.weight"):
            heads = its.view(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, values = heads.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)
            yield called.replace("kv_b", "k_b"), keys.transpose(1, 2)
            yield called.replace("kv_b", "v_b"), values
        else:
            yield called, its


def _older_deepseek_metadata(config: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    rope = config.rope_parameters
    found = {
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": getattr(config, "norm_topk_prob", False),
        **_stretched(rope),
    }
    if "mscale_all_dim" in rope:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return found


def _deepseek_metadata(config: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    found = _older_deepseek_metadata(config, tensors)
    return {
        **found,
        "attention.head_count_kv": 1,
        "attention.key_length_mla": found["attention.key_length"],
        "attention.value_length_mla": found["attention.value_length"],
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
    }


ARCHITECTURES = {  # a second word says which of its layouts
    "deepseek2": (_deepseek, _deepseek_metadata),
    "deepseek2 older": (_older_deepseek, _older_deepseek_metadata),
    "gemma4": (_gemma4, _gemma4_metadata),
    "gpt-oss": (_gpt_oss, _gpt_oss_metadata),
}
