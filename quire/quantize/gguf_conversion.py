"""A Hugging Face checkpoint as a GGUF file's metadata and tensors, for the architectures in `ARCHITECTURES`.

The `gguf` package knows the names of tensors and of fields. What differs between the two kinds of files stands here:
the order of queries and keys, stacked experts, tensors with a dimension of one, and the tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.layers.rope import RopeConfig, inverse_frequencies
from quire.models.gguf.tensor_names import style_of
from quire.quantize.source import SourceModel, TensorFacts
from quire.text.pretokenizers import pre_tokenizer_named, pre_tokenizer_names
from quire.types import QuireError

Read = Callable[[int, int], Tensor]  # (first row, number of rows) -> [rows, ...] float32
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_KINDS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_PROBE = (
    "Hello, world! It's 3.14159 and 1234567 o'clock; naïve café déjà-vu  two  spaces\n\n\tTab\r\nXMLHttpRequest "
    "fooBar_baz()...  £5 ½ привет мир 你好，世界 こんにちは 안녕 a  1 \n 7 $9 ∑x² don't WE'LL"
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """How checkpoints of a model type become GGUF files."""

    name: str
    fields: Callable[[SourceModel], Mapping[str, Any]] = lambda source: {}
    hand_named: Mapping[str, str] | None = None  # within a layer: names that the `gguf` package lacks


def _mixture(source: SourceModel) -> dict[str, Any]:
    config = source.config
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    return {
        "expert_count": config.get("num_experts") or config.get("num_local_experts"),
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": inner,
        "expert_weights_norm": bool(config.get("norm_topk_prob", True)),
    }


def _lfm2(source: SourceModel) -> dict[str, Any]:
    config = source.config
    kinds = config.get("layer_types") or []
    heads = [config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in kinds]
    up = source.checkpoint.shapes["model.layers.0.feed_forward.w1.weight"]
    return {
        "attention.head_count_kv": heads,
        "shortconv.l_cache": config["conv_L_cache"],
        "feed_forward_length": up[0],
        "attention.layer_norm_rms_epsilon": float(config.get("norm_eps", 1e-5)),
    }


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama"),
    "mistral": Architecture("llama"),
    "mixtral": Architecture("llama", _mixture),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3_moe": Architecture("qwen3moe", _mixture),
    "lfm2": Architecture("lfm2", _lfm2),
}


def architecture_of(source: SourceModel) -> Architecture:
    kind = source.config.get("model_type")
    if kind not in ARCHITECTURES:
        what = f"A folder of model type {kind} can't be written as a GGUF file."
        known = f"Possible are {', '.join(ARCHITECTURES)}, and any GGUF file as the source."
        raise QuireError("unsupported_model", what, f"{known} Or choose a compressed-tensors type, INT8 for example.")
    return ARCHITECTURES[str(kind)]


# ---------------------------------------------------------------------------------------------------------------------
# Tensors


def convert_tensors(source: SourceModel) -> Iterator[tuple[str, TensorFacts, Read]]:
    """Yields GGUF name, facts (with the name in the checkpoint) and reader of each tensor."""
    import gguf

    arch = architecture_of(source)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch.name)
    known = gguf.get_tensor_name_map(kind, source.num_layers)
    is_permuted, head_dim = style_of(arch.name).permuted, _head_dim(source)
    stacks: dict[str, list[str]] = {}
    tied = bool(source.config.get("tie_word_embeddings"))
    rope = _rope_divisors(source)
    if rope is not None:
        yield "rope_freqs.weight", source.facts("rope_freqs.weight", tuple(rope.shape)), _rows_of(lambda: rope)
    for name, shape in source.checkpoint.shapes.items():
        expert = _EXPERT.fullmatch(name)
        if expert:
            stacks.setdefault(_stack_name(expert), []).append(name)
            continue
        if name == "lm_head.weight" and tied:
            continue
        called = known.get_name(name, try_suffixes=(".weight", ".bias"))
        if called is None:
            what = f"{name} has no name in GGUF files of the architecture {arch.name}."
            raise QuireError("unsupported_model", what, "Choose a compressed-tensors type, INT8 for example.")
        read: Read = partial(_read_rows, source, name)
        facts = source.facts(name, shape)
        if 1 in shape and len(shape) == 3:  # a convolution's [channels, 1, taps]
            flat = (shape[0], shape[2])
            facts = source.facts(name, flat)
            read = _rows_of(partial(_read_flat, source, name, flat))
        if is_permuted and re.search(r"\.self_attn\.[qk]_proj\.", name):
            read = _rows_of(partial(_read_permuted, source, name, head_dim))
        yield called, facts, read
    for called, names in stacks.items():
        names.sort(key=lambda name: int(_EXPERT.fullmatch(name)[2]))  # type: ignore[index]
        shape = (len(names), *source.checkpoint.shapes[names[0]])
        yield called, source.facts(names[0], shape), partial(_read_stack, source, names)


def _stack_name(expert: re.Match[str]) -> str:
    layer = re.search(r"\.(\d+)\.", expert[1])
    assert layer is not None
    return f"blk.{layer[1]}.ffn_{_KINDS[expert[3]]}_exps.weight"


def _read_rows(source: SourceModel, name: str, first: int, count: int) -> Tensor:
    if len(source.checkpoint.shapes[name]) < 2:
        return source.read(name)[first : first + count]
    return source.checkpoint.source(name).read(first, count).float()


def _read_stack(source: SourceModel, names: list[str], first: int, count: int) -> Tensor:
    return torch.stack([source.read(name) for name in names[first : first + count]])


def _read_flat(source: SourceModel, name: str, shape: tuple[int, ...]) -> Tensor:
    return source.read(name).view(shape)


def _read_permuted(source: SourceModel, name: str, head_dim: int) -> Tensor:
    return _permute(source.read(name), head_dim)


def _rows_of(whole: Callable[[], Tensor]) -> Read:
    return lambda first, count: whole()[first : first + count]


def _permute(tensor: Tensor, head_dim: int) -> Tensor:
    """Interleaves the two halves of each head, so that rope rotates adjacent elements."""
    return tensor.view(-1, 2, head_dim // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _head_dim(source: SourceModel) -> int:
    config = source.config
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _rope_divisors(source: SourceModel) -> Tensor | None:
    """Returns the factors that llama3's rope scaling divides frequencies by; None: rope is not scaled so."""
    rope = RopeConfig.from_hf(dict(source.config))
    if rope.kind in ("default", "linear", "yarn"):
        return None
    if rope.kind != "llama3":
        raise QuireError("unsupported_model", f"Rope of type {rope.kind} can't be written to a GGUF file.", "")
    plain = RopeConfig(theta=rope.theta)
    return inverse_frequencies(plain, _head_dim(source)) / inverse_frequencies(rope, _head_dim(source))


# ---------------------------------------------------------------------------------------------------------------------
# Metadata


def convert_metadata(source: SourceModel, gguf: Any) -> tuple[str, dict[str, tuple[Any, Any, Any]]]:
    """Returns the architecture and the fields as (value, type, type of items)."""
    arch, config = architecture_of(source), source.config
    head_dim, rope = _head_dim(source), RopeConfig.from_hf(dict(config))
    own: dict[str, Any] = {
        "block_count": source.num_layers,
        "context_length": int(config["max_position_embeddings"]),
        "embedding_length": int(config["hidden_size"]),
        "feed_forward_length": int(config.get("intermediate_size") or 0),
        "attention.head_count": int(config["num_attention_heads"]),
        "attention.head_count_kv": int(config.get("num_key_value_heads") or config["num_attention_heads"]),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps", 1e-5)),
        "rope.freq_base": float(rope.theta),
        "rope.dimension_count": head_dim,
        "vocab_size": int(config["vocab_size"]),
        **arch.fields(source),
    }
    if rope.kind in ("linear", "yarn"):
        own |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": float(rope.factor)}
        if rope.kind == "yarn":
            own["rope.scaling.original_context_length"] = rope.original_len
    fields = {"general.name": source.files.name.rpartition("/")[2]}
    fields |= {f"{arch.name}.{key}": value for key, value in own.items()}
    fields |= _tokenizer_fields(source)
    return arch.name, {key: _typed(value, gguf) for key, value in fields.items()}


def _typed(value: Any, gguf: Any) -> tuple[Any, Any, Any]:
    kinds = gguf.GGUFValueType

    def kind_of(item: Any) -> Any:
        if isinstance(item, bool):
            return kinds.BOOL
        if isinstance(item, int):
            return kinds.UINT32
        return kinds.FLOAT32 if isinstance(item, float) else kinds.STRING

    if not isinstance(value, list):
        return value, kind_of(value), None
    if value and isinstance(value[0], int) and not isinstance(value[0], bool):
        return value, kinds.ARRAY, kinds.INT32
    return value, kinds.ARRAY, kind_of(value[0]) if value else kinds.STRING


def _tokenizer_fields(source: SourceModel) -> dict[str, Any]:
    """Returns the vocabulary of tokenizer.json; nothing if the folder has none."""
    folder = source.files.path
    if not (folder / "tokenizer.json").exists():
        return {}
    from quire.text.tokenizer import Tokenizer

    raw = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_folder(folder)
    model = raw.get("model", {})
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        what = f"The tokenizer of {source.files.name} is not a byte-level BPE, which is all that is converted."
        raise QuireError("unsupported_tokenizer", what, "Choose a compressed-tensors type, INT8 for example.")
    size = int(source.config["vocab_size"])
    tokens, types = [f"[PAD{index}]" for index in range(size)], [5] * size  # 5: unused
    for text, index in model["vocab"].items():
        tokens[index], types[index] = text, 1
    for token in raw.get("added_tokens", []):
        tokens[token["id"]], types[token["id"]] = token["content"], 3 if token.get("special") else 4
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _find_pre_tokenizer(folder / "tokenizer.json"),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }
    eos = tokenizer.eos_ids
    if eos:
        fields["tokenizer.ggml.eos_token_id"] = eos[0]
    if tokenizer.bos_id is not None:
        fields["tokenizer.ggml.bos_token_id"] = tokenizer.bos_id
        fields["tokenizer.ggml.add_bos_token"] = tokenizer.encode("a")[:1] == [tokenizer.bos_id]
    if tokenizer.chat_template:
        fields["tokenizer.chat_template"] = tokenizer.chat_template
    return fields


def _find_pre_tokenizer(path: Any) -> str:
    """Returns GGUF's name of the way a tokenizer splits text, found by splitting a text that tells them apart."""
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(path))

    def split(normalizer: Any, pre: Any) -> list[str]:
        text = _PROBE if normalizer is None else normalizer.normalize_str(_PROBE)
        return [piece for piece, _ in pre.pre_tokenize_str(text)]

    wanted = split(backend.normalizer, backend.pre_tokenizer) if backend.pre_tokenizer is not None else None
    for name in pre_tokenizer_names():
        if wanted is not None and split(*pre_tokenizer_named(name).build()) == wanted:
            return name
    what = f"{path} splits text in a way that has no name in GGUF files."
    raise QuireError("unsupported_tokenizer", what, "Choose a compressed-tensors type, INT8 for example.")
