"""Translates a GGUF file's metadata, tensor names and defaults to those of a Hugging Face checkpoint.

The loader calls these functions and treats both kinds of files alike. `files.gguf` reads the container.
"""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.files.gguf import GGUFFile, GGUFTensor
from quire.kernels.formats.gguf_blocks import FORMATS, dequantize
from quire.layers.rope import yarn_magnitude
from quire.models.gguf.metadata import count_layers, get, get_flag, get_layers, key_of, need
from quire.models.gguf.style import GGUFStyle
from quire.models.gguf.tensor_names import hf_name, style_of
from quire.models.registry import GGUF_ARCHITECTURES, unsupported
from quire.types import QuireError

ROPE_DIVISORS = "rope_freqs.weight"
ROPE_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
# Field of a config.json -> metadata key. Families read the fields that they know.
_FIELDS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_LARGE_GEMMAS = {
    ("gemma2", 46),
    ("gemma3", 62),
}  # 27B models: scores are scaled by hidden size / heads, which differs from their head_dim
_MIXTURES = {  # architecture -> model_type of its mixture of experts
    "deepseek2": "deepseek_v2",
    "dots1": "dots1",
    "ernie4_5-moe": "ernie4_5_moe",
    "exaone-moe": "exaone_moe",
    "gemma4": "gemma4_text",
    "glm4moe": "glm4_moe",
    "gpt-oss": "gpt_oss",
    "granitehybrid": "granitemoehybrid",
    "granitemoe": "granitemoeshared",
    "hunyuan-moe": "hunyuan_v1_moe",
    "lfm2moe": "lfm2_moe",
    "llama": "mixtral",
    "minimax-m2": "minimax_m2",
    "nemotron_h_moe": "nemotron_h",
    "olmoe": "olmoe",
    "qwen2moe": "qwen2_moe",
    "qwen35moe": "qwen3_5_moe_text",
    "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next",
}
_EXPERT_FIELDS = {  # field -> metadata key, in mixtures
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "num_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def read_config(file: GGUFFile) -> dict[str, Any]:
    """Returns the metadata as the fields of a config.json."""
    arch = file.metadata.get("general.architecture")
    if arch == "clip" or file.metadata.get("general.type") == "mmproj":
        what = f"{file.path} is the vision part of a model, not the model."
        raise QuireError("not_a_model", what, "Give the model's own GGUF file.", param="model")
    if arch not in GGUF_ARCHITECTURES:
        raise unsupported(f"GGUF architecture {arch!r}")
    num_experts = get(file, "expert_count", 0)
    if num_experts and arch not in _MIXTURES:
        raise unsupported(f"A mixture of experts (GGUF architecture {arch!r})")
    style = style_of(arch)
    num_heads, num_layers = need(file, "attention.head_count"), count_layers(file)
    width = need(file, "embedding_length")
    head_dim = get(file, "attention.key_length", width // max(num_heads, 1))
    if _read(file, style, "attention.value_length", head_dim) != head_dim:
        raise unsupported("A model whose key and value dimensions differ")
    if "token_embd.weight" not in file.tensors:
        raise QuireError(
            "bad_weights", f"{file.path} lacks the tensor token_embd.weight.", "Fetch or convert it again."
        )
    window = get(file, "attention.sliding_window", None) or None
    kv_heads, layer_types = _layers(file, style, num_layers, num_heads, window)
    has_bias = bool({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"} & set(file.tensors))
    given = {name: get(file, key, None) for name, key in {**_FIELDS, **style.metadata}.items()}
    fields = {
        **style.fields,
        **{name: value for name, value in given.items() if value is not None},
        "model_type": _MIXTURES[arch] if num_experts else GGUF_ARCHITECTURES[arch],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        "intermediate_size": _read(file, style, "feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": get(file, "attention.layer_norm_rms_epsilon", 1e-5),
        "max_position_embeddings": get(file, "context_length", 2048),
        "rope_parameters": _rope(file),
        "partial_rotary_factor": get(file, "rope.dimension_count", head_dim) / head_dim,
        "original_max_position_embeddings": get(file, "rope.scaling.original_context_length", None),
        "query_pre_attn_scalar": width // num_heads if (arch, num_layers) in _LARGE_GEMMAS else head_dim,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "layer_types": None if style.has_own_windows else layer_types,
        "attention_bias": arch != "qwen2" and has_bias,
        "use_qkv_bias": has_bias,
        "use_bias": has_bias,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in file.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in file.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **(_experts(file, num_experts) if num_experts else {}),
        "tensor_types": {name: tensor.type.name for name, tensor in named_tensors(file).items()},
    }
    return fields if style.extra_fields is None else {**fields, **style.extra_fields(file, fields)}


def _read(file: GGUFFile, style: GGUFStyle, key: str, default: int | None = None) -> int | None:
    """Returns a number that holds for all layers; the default if the style reads it per layer."""
    if key in style.read_apart:
        return default
    return need(file, key) if default is None else get(file, key, default)


def _layers(
    file: GGUFFile, style: GGUFStyle, num_layers: int, num_heads: int, window: int | None
) -> tuple[int | None, list[str]]:
    """Returns the number of key-value heads and the type of each layer."""
    kind = "full_attention" if window is None else "sliding_attention"
    windows = None if window is None else get_layers(file, "attention.sliding_window_pattern")
    if windows is not None:
        kinds = ["sliding_attention" if has_window else "full_attention" for has_window in windows]
        return _read(file, style, "attention.head_count_kv", num_heads), kinds
    without = style.keyless_type
    heads = None if without is None else get_layers(file, "attention.head_count_kv")
    if without is None or heads is None or len(set(heads) - {0}) != 1:
        return _read(file, style, "attention.head_count_kv", num_heads), [kind] * num_layers
    return max(heads), [kind if number else without for number in heads]


def named_tensors(file: GGUFFile) -> dict[str, GGUFTensor]:
    """Returns a file's tensors by checkpoint name, in checkpoint shapes, without those of draft layers."""
    style, num_layers = style_of(file.metadata["general.architecture"]), count_layers(file)
    named = {}
    for name, tensor in file.tensors.items():
        in_layer = re.fullmatch(r"blk\.(\d+)\.(.*?)(\.weight)?", name)
        if in_layer and int(in_layer[1]) >= num_layers:
            continue
        shape = style.shapes.get(in_layer[2]) if in_layer else None
        if shape is not None:
            shape = tuple(tensor.num_elements if length < 0 else length for length in shape)
            tensor = replace(tensor, shape=shape)
        named[hf_name(name, style)] = tensor
    return named


def read_rows(tensor: GGUFTensor, first: int, num_rows: int) -> Tensor:
    """Returns rows of a tensor in float32. Only their bytes are read."""
    form = FORMATS.get(tensor.type.name)
    if form is None:
        what = f"Tensor {tensor.name} has the type {tensor.type.name}, which is not supported."
        raise QuireError("unsupported_model", what, f"Supported are {', '.join(FORMATS)}.")
    row_elements = math.prod(tensor.shape[1:])
    start, stop = (index * row_elements // form.elements * form.num_bytes for index in (first, first + num_rows))
    return dequantize(raw_blocks(tensor)[start:stop], tensor.type.name).view(num_rows, *tensor.shape[1:])


def raw_blocks(tensor: GGUFTensor) -> Tensor:
    """Returns the tensor's bytes, [bytes] uint8, as they are in the mapped file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the map is read-only, and nothing here writes to it
        return torch.from_numpy(tensor.data)


def sampling_defaults(file: GGUFFile) -> dict[str, Any]:
    """Returns `general.sampling.*` by SamplingParams name."""
    keys = {name: f"general.sampling.{key}" for key, name in _SAMPLING.items()}
    return {name: file.metadata[key] for name, key in keys.items() if key in file.metadata}


def is_permuted(file: GGUFFile, name: str) -> bool:
    """Returns whether the rows of this tensor (by its checkpoint name) are permuted within each head.

    Files of the llama architecture and similar ones order queries and keys so that rope rotates adjacent elements.
    Quire, like the original checkpoints, rotates element i with element i + head_dim / 2.
    """
    is_permuted = style_of(file.metadata["general.architecture"]).permuted
    return is_permuted and bool(re.search(r"\.self_attn\.[qk]_proj\.", name))


def unpermute(tensor: Tensor, head_dim: int) -> Tensor:
    """Deinterleaves the two halves of each head: [heads * head_dim, ...] -> the same shape, one half after the
    other.
    """
    return tensor.view(-1, head_dim // 2, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _experts(file: GGUFFile, num_experts: int) -> dict[str, Any]:
    """Returns the fields of a mixture. Expert weights are normalized unless the file or the architecture's style says
    otherwise.
    """
    fields = {
        "num_local_experts": num_experts,
        "num_experts": num_experts,
        "n_routed_experts": num_experts,
        "num_experts_per_tok": need(file, "expert_used_count"),
        "norm_topk_prob": get_flag(file, "expert_weights_norm", True),
    }
    given = {name: get(file, key, None) for name, key in _EXPERT_FIELDS.items()}
    return {**fields, **{name: value for name, value in given.items() if value is not None}}


def _rope(file: GGUFFile) -> dict[str, Any]:
    kind = get(file, "rope.scaling.type", "linear" if key_of(file, "rope.scale_linear") in file.metadata else "none")
    if kind not in ("none", "linear", "yarn"):
        raise unsupported(f"GGUF rope scaling {kind!r}")
    factor = get(file, "rope.scaling.factor", get(file, "rope.scale_linear", 1.0))
    rope: dict[str, Any] = {
        "rope_type": "default" if kind == "none" else kind,
        "rope_theta": get(file, "rope.freq_base", 10000.0),
        "factor": factor,
        "original_max_position_embeddings": get(file, "rope.scaling.original_context_length", None),
        "beta_fast": get(file, "rope.scaling.yarn_beta_fast", None),
        "beta_slow": get(file, "rope.scaling.yarn_beta_slow", None),
    }
    if set(ROPE_FACTORS.values()) <= set(file.tensors):
        tensors = {name: file.tensors[called] for name, called in ROPE_FACTORS.items()}
        factors = {name: read_rows(tensor, 0, tensor.shape[0]).tolist() for name, tensor in tensors.items()}
        attention_factor = get(file, "rope.scaling.attn_factor", None)
        return {**rope, **factors, "rope_type": "longrope", "factor": None, "attention_factor": attention_factor}
    if kind == "yarn" and key_of(file, "rope.scaling.attn_factor") in file.metadata:
        rope["attention_factor"] = get(file, "rope.scaling.attn_factor", 1.0) * yarn_magnitude(factor)
    divisors = file.tensors.get(ROPE_DIVISORS)
    if divisors is not None:
        rope["divisors"] = read_rows(divisors, 0, divisors.shape[0]).tolist()
    return rope
