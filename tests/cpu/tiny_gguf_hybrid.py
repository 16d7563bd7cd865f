"""GGUF files of recurrent hybrids for tests: tiny transformers models written as llama.cpp's converter would.

Names, shapes and values are made from the transformers model with the `gguf` package alone, so that nothing is shared
with the loader.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from tests.cpu.tiny_gguf import _add

_NAMES = (
    (r"^(model|backbone)\.embed\w+\.", "token_embd."),
    (r"^(model|backbone)\.(norm|norm_f|final_layernorm)\.", "output_norm."),
    (r"^lm_head\.", "output."),
    (r"^(model|backbone)\.layers\.(\d+)\.", r"blk.\2."),
    (r"\.(input_layernorm|norm)\.weight$", ".attn_norm.weight"),
    (r"self_attn\.|mamba\.|linear_attn\.|mixer\.|shared_mlp\.|feed_forward\.|block_sparse_moe\.|mlp\.", ""),
    (r"\.o_proj", ".attn_output"),
    (r"\.([qkv])_proj", r".attn_\1"),
    (r"\.([qk])_norm", r".attn_\1_norm"),
    (r"(?<!shared_)experts\.(gate|up|down)_proj(\.weight)?$", r"ffn_\1_exps.weight"),
    (r"shared_experts?\.(gate|up|down)_proj", r"ffn_\1_shexp"),
    (r"\.(gate|up|down)_proj", r".ffn_\1"),
    (r"shared_expert_gate", "ffn_gate_inp_shexp"),
    (r"gate\.e_score_correction_bias", "exp_probs_b.bias"),
    (r"\.(gate|router(\.layer)?)\.weight", ".ffn_gate_inp.weight"),
    (r"fc1_latent_proj", "ffn_latent_down"),
    (r"fc2_latent_proj", "ffn_latent_up"),
    (r"in_proj_qkv\.", "attn_qkv."),
    (r"in_proj_z\.", "attn_gate."),
    (r"in_proj_ba\.", "ssm_ba."),
    (r"in_proj_b\.", "ssm_beta."),
    (r"in_proj_a\.", "ssm_alpha."),
    (r"\.in_proj\.", ".ssm_in."),
    (r"out_proj", "ssm_out"),
    (r"conv1d", "ssm_conv1d"),
    (r"dt_bias", "ssm_dt.bias"),
    (r"A_log", "ssm_a"),
    (r"\.D$", ".ssm_d"),
)


def write_hybrid(model: Any, arch: str, path: Path, metadata: dict[str, Any], types: dict[str, str] | None = None,
                 without: str = "", trimmed: bool = False) -> None:  # fmt: skip
    """`metadata`: below the architecture's name; `types`: as in `write_gguf`; `without`: a key of the metadata to leave
    out; `trimmed`: leading dimensions of one are gone, as tools that copy files leave them."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**sizes(config, arch), **metadata}.items():
        if value is None or key == without:
            continue
        kind = gguf.GGUFValueType.get_type(value)
        unsigned = gguf.GGUFValueType.UINT32
        writer.add_key_value(f"{arch}.{key}", value, unsigned if kind == gguf.GGUFValueType.INT32 else kind)
    for name, tensor in _tensors(model, arch):
        if name == "output.weight" and config.tie_word_embeddings:
            continue
        fits = tensor.shape[-1] % 32 == 0  # what makes no whole blocks is kept in floats, as quantizers do
        tensor = tensor[0] if trimmed and tensor.dim() == 2 and len(tensor) == 1 else tensor
        _add(writer, name, tensor, types if types and fits else {})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sizes(config: Any, arch: str) -> dict[str, Any]:
    """The metadata that follows from a config without knowing its family."""

    def first(*names: str) -> Any:
        return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)

    heads = first("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads", "num_heads")
    head_dim = first("mamba_d_head", "mamba_head_dim", "linear_value_head_dim", "head_dim")
    rope = getattr(config, "rope_parameters", None) or {}
    has_attention = hasattr(config, "num_attention_heads")
    attention_dim = has_attention and (first("head_dim") or config.hidden_size // config.num_attention_heads)
    return {
        "block_count": len(first("layers_block_type", "layer_types") or range(config.num_hidden_layers)),
        "context_length": first("max_position_embeddings") or 1 << 20,
        "embedding_length": config.hidden_size,
        "feed_forward_length": first("intermediate_size") or 0,
        "attention.head_count": config.num_attention_heads if has_attention else 0,
        "attention.head_count_kv": config.num_key_value_heads if has_attention else None,
        "attention.key_length": attention_dim if has_attention else None,
        "attention.value_length": attention_dim if has_attention else None,
        "attention.layer_norm_rms_epsilon": first("rms_norm_eps", "layer_norm_epsilon"),
        "rope.freq_base": rope.get("rope_theta"),
        "ssm.conv_kernel": first("mamba_d_conv", "conv_kernel", "linear_conv_kernel_dim"),
        "ssm.inner_size": heads * head_dim,
        "ssm.state_size": first("mamba_d_state", "ssm_state_size", "linear_key_head_dim", "state_size"),
        "ssm.time_step_rank": heads,
        "ssm.group_count": first("mamba_n_groups", "n_groups", "linear_num_key_heads"),
    }


def _tensors(model: Any, arch: str) -> Iterator[tuple[str, Tensor]]:
    config = model.config
    for name, tensor in model.state_dict().items():
        tensor = _scaled(name, tensor, config) if arch == "falcon-h1" else tensor
        for part, values in _split(name, tensor.detach().clone(), config):
            if re.search(r"\.(mamba|mixer)\.norm\.weight", part):
                groups = getattr(config, "mamba_n_groups", None) or config.n_groups
                yield f"blk.{part.split('.')[2]}.ssm_norm.weight", values.view(groups, -1)
            elif part.endswith("linear_attn.norm.weight"):
                yield f"blk.{part.split('.')[2]}.ssm_norm.weight", values
            else:
                yield _called(part, arch), _converted(part, values, config, arch)


def _called(name: str, arch: str) -> str:
    after = "post_attention_norm" if arch.startswith("qwen") else "ffn_norm"
    name = re.sub("post_attention_layernorm", after, name)
    if arch == "falcon-h1":  # whose norm has no more of a name
        name = name.replace("pre_ff_layernorm.weight", "ffn_norm")
    name = name.replace("pre_ff_layernorm", "ffn_norm")
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _converted(name: str, tensor: Tensor, config: Any, arch: str) -> Tensor:
    is_qwen = arch.startswith("qwen")
    if "conv1d.weight" in name:
        tensor = tensor.squeeze(1)
    if arch.startswith("qwen35") and "linear_attn" in name:
        tensor = _tiled(name, tensor, config)
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if name.endswith(("A_log", ".D")) and not is_qwen:
        tensor = tensor[:, None]
    if name.endswith("norm.weight") and is_qwen:
        tensor = tensor + 1
    if arch == "granitehybrid" and re.search(r"[qk]_proj", name):
        head_dim = config.hidden_size // config.num_attention_heads
        tensor = tensor.view(-1, 2, head_dim // 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    return tensor


def _split(name: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint keeps in one tensor and a GGUF in several."""
    if name.endswith(("experts.gate_up_proj", "moe.input_linear.weight")):
        for matrix, part in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
            yield f"{name.split('.experts.')[0].removesuffix('.input_linear.weight')}.experts.{matrix}_proj", part
    elif name.endswith("moe.output_linear.weight"):
        yield name.replace("output_linear.weight", "experts.down_proj"), tensor
    elif name.endswith("shared_mlp.input_linear.weight"):
        for matrix, part in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield _of_shared(name, matrix, config), part
    elif name.endswith("shared_mlp.output_linear.weight"):
        yield _of_shared(name, "down", config), tensor
    elif name.endswith("in_proj_qkvz.weight"):
        groups, keys = config.linear_num_key_heads, config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim // groups
        parts = tensor.view(groups, -1, tensor.shape[1]).split((keys, keys, values, values), dim=1)
        q, k, v, z = (part.reshape(-1, tensor.shape[1]) for part in parts)
        yield name.replace("qkvz", "qkv"), torch.cat((q, k, v))
        yield name.replace("qkvz", "z"), z
    else:
        yield name, tensor


def _of_shared(name: str, matrix: str, config: Any) -> str:
    block = "shared_expert" if config.num_local_experts else "mlp"
    return f"{name.split('.shared_mlp.')[0]}.{block}.{matrix}_proj.weight"


def _tiled(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Qwen3.5: the first value head of every group, then the second of every group, ..."""
    groups, head_dim = config.linear_num_key_heads, config.linear_value_head_dim

    def tile(rows: Tensor, size: int) -> Tensor:
        return rows.unflatten(0, (groups, -1, size)).transpose(0, 1).flatten(0, 2)

    if re.search(r"in_proj_qkv|conv1d", name):
        keys = 2 * groups * config.linear_key_head_dim
        return torch.cat((tensor[:keys], tile(tensor[keys:], head_dim)))
    if "in_proj_z" in name:
        return tile(tensor, head_dim)
    if "out_proj" in name:
        return tile(tensor.t(), head_dim).t()
    return tile(tensor, 1)


def _scaled(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Falcon-H1's multipliers are done to its matrices."""
    c = config
    rows = [c.mamba_d_ssm, c.mamba_d_ssm, *[c.mamba_n_groups * c.mamba_d_state] * 2, c.mamba_n_heads]
    parts = torch.tensor(c.ssm_multipliers).repeat_interleave(torch.tensor(rows))
    by: dict[str, Any] = {
        "embed_tokens": c.embedding_multiplier,
        "lm_head": c.lm_head_multiplier,
        "q_proj": c.attention_in_multiplier,
        "k_proj": c.attention_in_multiplier * c.key_multiplier,
        "v_proj": c.attention_in_multiplier,
        "o_proj": c.attention_out_multiplier,
        "out_proj": c.ssm_out_multiplier,
        "in_proj": c.ssm_in_multiplier * parts[:, None],
        "gate_proj": c.mlp_multipliers[0],
        "down_proj": c.mlp_multipliers[1],
    }
    return tensor * by.get(name.split(".")[-2], 1.0)
