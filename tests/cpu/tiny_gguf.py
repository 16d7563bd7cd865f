"""GGUF files for tests: tiny transformers models written as llama.cpp's converter would, and real files read back.

Both directions go through the `gguf` package and numpy, so they share nothing with the loader they test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import torch
import transformers

PERMUTED = (
    "llama",
    "arcee",
    "granite",
    "granitemoe",
    "mistral3",
    "olmo",
    "smollm3",
)  # their converters keep queries and keys so that rope turns neighbours
RAISED = ("gemma", "gemma2", "gemma3", "nemotron")  # theirs add the one that checkpoints leave out of norms
_NAMES = (
    (r"model\.embed_tokens\.", "token_embd."),
    (r"model\.norm\.", "output_norm."),
    (r"lm_head\.", "output."),
    (r"model\.layers\.(\d+)\.", r"blk.\1."),
    (r"input_layernorm", "attn_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"self_attn\.o_proj", "attn_output"),
    (r"self_attn\.([qkv])_proj", r"attn_\1"),
    (r"self_attn\.([qk])_norm", r"attn_\1_norm"),
    (r"mlp\.(gate|up|down)_proj", r"ffn_\1"),
    (r"mlp\.gate\.", "ffn_gate_inp."),
    (r"block_sparse_moe\.router\.", "ffn_gate_inp."),
    (r"shared_mlp\.output_linear", "ffn_down_shexp"),
)


def gguf_name(name: str) -> str:
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def write_gguf(model: Any, arch: str, path: Path, types: dict[str, str] | None = None,
               extra: dict[str, np.ndarray] | None = None, metadata: dict[str, Any] | None = None,
               without: str = "", split_tensors: int = 0) -> None:  # fmt: skip
    """`types`: regular expression of GGUF names -> quantization type; the rest is F32. `extra`: more tensors;
    `without`: the name of one to leave out; `split_tensors`: the maximum in each part of a split file. Names are those
    the `gguf` package has for the architecture."""
    config = model.config
    kind = next((kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), gguf.MODEL_ARCH.LLAMA)
    known = gguf.get_tensor_name_map(kind, config.num_hidden_layers)

    def called(name: str) -> str:
        return known.get_name(name, try_suffixes=(".weight", ".bias")) or gguf_name(name)

    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split_tensors, small_first_shard=split_tensors > 0)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for name in ("layer_norm_eps", "norm_epsilon", *(() if arch in ("lfm2", "lfm2moe") else ("norm_eps",))):
        if hasattr(config, name):
            writer.add_layer_norm_eps(getattr(config, name))
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, gguf.GGUFValueType.UINT32 if kind == gguf.GGUFValueType.INT32 else kind)
    for name, tensor in _split_experts(_join_head_norms(model.state_dict())):
        if (name == "lm_head.weight" and config.tie_word_embeddings) or called(name) == without:
            continue
        if "norm" in name and name.endswith("weight") and arch in RAISED:
            tensor = tensor + 1
        if arch in PERMUTED and re.search(r"[qk]_proj", name):
            halves = tensor.view(-1, 2, head_dim // 2, *tensor.shape[1:])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        if arch == "gptneox" and "query_key_value" in name:  # head by head: its converter parts them
            tensor = tensor.unflatten(0, (-1, 3, head_dim)).transpose(0, 1).reshape(tensor.shape)
        _add(writer, called(name), tensor, types or {})
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _join_head_norms(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """StableLM's norms of heads are a tensor each; GGUF has them as rows of one."""
    joined: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        whole, found = re.subn(r"\.norms\.\d+\.", ".", name)
        joined[whole] = torch.cat([*([joined[whole]] if whole in joined else []), tensor[None]]) if found else tensor
    return joined


def _split_experts(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """transformers keeps gates above ups in one tensor, GGUF each on its own; there taps have a dimension of one, and
    biases of a choice belong to no module."""
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            for kind, part in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                yield re.sub(r"\w+\.experts\.gate_up_proj", f"ffn_{kind}_exps.weight", name), part
        elif name.endswith("shared_mlp.input_linear.weight"):
            for kind, part in zip(("gate", "up"), tensor.chunk(2), strict=True):
                yield name.replace("shared_mlp.input_linear", f"ffn_{kind}_shexp"), part
        elif name.endswith("conv.conv.weight"):
            yield name, tensor.squeeze(1)
        elif name.endswith("expert_bias"):
            yield f"{name}.bias", tensor
        elif name.endswith("e_score_correction_bias"):
            yield name.replace("_bias", ".bias").replace(".gate.moe_statics", ".moe_statics"), tensor
        else:
            yield re.sub(r"\w+\.experts\.down_proj", "ffn_down_exps.weight", name), tensor


def _add(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, types: dict[str, str]) -> None:
    array = tensor.detach().float().contiguous().numpy()
    for pattern, type_name in types.items():
        if re.fullmatch(pattern, name):
            kind = gguf.GGMLQuantizationType[type_name]
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
            return
    writer.add_tensor(name, array)


@contextmanager
def quick_reading() -> Iterator[None]:
    """Meanwhile others read a large file in a third of the time: gguf cuts a vocabulary out of a memory map, string by
    string, which is cheaper out of an array over the same bytes, and transformers has one table of names made anew for
    each of a model's modules."""
    mapped = np.memmap
    with (
        patch.object(np, "memmap", lambda *args, **how: np.asarray(mapped(*args, **how))),
        patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ):
        yield


def transformers_from_gguf(path: Path) -> Any:
    """A file of the llama architecture as a float32 transformers model, without help from our own reader."""
    reader = gguf.GGUFReader(path)

    def field(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = transformers.LlamaConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings="output.weight" not in tensors,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    state = {}
    for name in model.state_dict():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            name = "model.embed_tokens.weight"
        tensor = tensors[gguf_name(name)]
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if re.search(r"[qk]_proj", name):
            head_dim = config.hidden_size // config.num_attention_heads
            pairs = array.reshape(-1, head_dim // 2, 2, array.shape[-1])
            array = np.swapaxes(pairs, 1, 2).reshape(array.shape)
        state[name] = torch.from_numpy(np.array(array, dtype=np.float32))
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its table was left on meta
    return model.eval()
