"""Writes safetensors folders in compressed-tensors form: packed tensors, config.json that describes them, and the
tokenizer's files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.files.safetensors import INDEX_NAME, SINGLE_NAME
from quire.kernels.formats.packed_encode import (
    fp8_rows,
    integer_scales,
    mxfp4,
    nvfp4,
    pack_words,
    round_integers,
)
from quire.quantize.parts import Parts, naming_full_disks, write_whole
from quire.quantize.recipe import Recipe
from quire.quantize.source import SourceModel, TensorFacts
from quire.types import QuireError

SHARD_BYTES = 4 << 30
GROUPS = (128, 64, 32)  # columns that share a scale in W4A16: the first that divides a matrix's
CONTENT_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_DYNAMIC = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
_STACKED = re.compile(r".*\.experts\.(gate|up|down|gate_up)_proj(\.weight)?")

Rounded = Callable[[str, Tensor], dict[str, Tensor] | None]  # what GPTQ or AWQ made of a matrix, if anything


def group_of(columns: int) -> int:
    return next(group for group in GROUPS if columns % group == 0)


def pack(matrix: Tensor, kind: str, importance: Tensor | None) -> dict[str, Tensor]:
    """Returns the tensors that hold a matrix, by the end of their names. matrix [rows, columns] float32"""
    if kind == "INT8":
        scales = integer_scales(matrix, 8, matrix.shape[1], importance)
        return {"weight": round_integers(matrix, scales, 8), "weight_scale": scales}
    if kind == "W4A16":
        scales = integer_scales(matrix, 4, group_of(matrix.shape[1]), importance).bfloat16()
        return pack_int4(round_integers(matrix, scales, 4), scales)
    if kind == "FP8":
        values, scales = fp8_rows(matrix)
        return {"weight": values, "weight_scale": scales}
    if kind == "NVFP4":
        packed, scales, overall = nvfp4(matrix)
        return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": overall}
    assert kind == "MXFP4"
    packed, exponents = mxfp4(matrix)
    return {"weight_packed": packed, "weight_scale": exponents}


def pack_int4(numbers: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Returns the tensors of four-bit integers, [rows, columns] int8, with scales [rows, groups]."""
    shape = torch.tensor(numbers.shape, dtype=torch.int64)
    return {"weight_packed": pack_words(numbers, 4), "weight_scale": scales, "weight_shape": shape}


_FORMATS = {
    "INT8": "int-quantized",
    "W4A16": "pack-quantized",
    "FP8": "float-quantized",
    "NVFP4": "nvfp4-pack-quantized",
    "MXFP4": "mxfp4-pack-quantized",
}


def scheme_of(kind: str, group: int) -> dict[str, Any]:
    """Returns config.json's description of a scheme."""
    base = {"symmetric": True, "dynamic": False, "observer": "minmax"}
    if kind == "INT8":
        weights = {"type": "int", "num_bits": 8, "strategy": "channel", **base}
        return {"weights": weights, "input_activations": _DYNAMIC}
    if kind == "W4A16":
        return {"weights": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": group, **base}}
    if kind == "FP8":
        weights = {"type": "float", "num_bits": 8, "strategy": "channel", **base}
        return {"weights": weights, "input_activations": {**_DYNAMIC, "type": "float"}}
    if kind == "NVFP4":
        return {"weights": {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16, **base}}
    scale = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    return {"weights": {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32, **scale, **base}}


def write_folder(
    source: SourceModel,
    recipe: Recipe,
    importance: Mapping[str, Tensor],
    parts: Parts,
    out: Path,
    on_bytes: Callable[[int], None],
    *,
    rounded: Rounded = lambda name, matrix: None,
    floats: Mapping[str, Tensor] | None = None,
) -> dict[str, str]:
    """Writes the folder and returns the type of each tensor by its name. `rounded`: matrices that a method has rounded
    itself; `floats`: tensors that it has changed.
    """
    floats = floats or {}
    tensors = source.tensors()
    types = {tensor.name: _type_of(recipe, tensor) for tensor in tensors}
    done, files = 0, []
    for tensor in tensors:

        def make(tensor: TensorFacts = tensor) -> dict[str, Tensor]:
            matrix = floats.get(tensor.name)
            matrix = source.read(tensor.name) if matrix is None else matrix
            kind = types[tensor.name]
            if kind not in _FORMATS:
                return {tensor.name: matrix.bfloat16() if kind == "BF16" else matrix}
            found = rounded(tensor.name, matrix) or pack(matrix, kind, importance.get(tensor.name))
            prefix = tensor.name.removesuffix("weight")
            return {f"{prefix}{end}": value for end, value in found.items()}

        files.append((tensor, parts.keep(tensor.name, make)))
        done += 4 * torch.Size(tensor.shape).numel()
        on_bytes(done)
    partial = out.with_name(f"{out.name}.new")
    with naming_full_disks(out):
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            _write_shards(partial, [path for _, path in files])
            _write_config(source, partial, tensors, types)
            _write_tokenizer(source, partial)
            os.replace(partial, out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return types


def _type_of(recipe: Recipe, tensor: TensorFacts) -> str:
    kind = recipe.type_of(tensor)
    if kind == "F32":  # norms and other vectors
        return "BF16"
    if kind in _FORMATS and (len(tensor.shape) != 2 or _STACKED.fullmatch(tensor.name)):
        what = f"{tensor.name} stacks the matrices of all experts, which no compressed-tensors type describes."
        raise QuireError("unsupported_model", what, "Give a checkpoint with a tensor for each expert, or write a GGUF.")
    return kind


def _write_shards(folder: Path, files: list[Path]) -> None:
    from safetensors.torch import load_file

    shards: list[dict[str, Tensor]] = [{}]
    sizes = [0]
    for path in files:
        tensors = load_file(path)
        size = sum(tensor.nbytes for tensor in tensors.values())
        if sizes[-1] and sizes[-1] + size > SHARD_BYTES:
            shards.append({})
            sizes.append(0)
        shards[-1] |= tensors
        sizes[-1] += size
    if len(shards) == 1:
        save_file(shards[0], folder / SINGLE_NAME, metadata={"format": "pt"})
        return
    index: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    described = {"metadata": {"total_size": sum(sizes)}, "weight_map": index}
    write_whole(folder / INDEX_NAME, json.dumps(described, indent=2).encode())


def _write_config(source: SourceModel, folder: Path, tensors: list[TensorFacts], types: Mapping[str, str]) -> None:
    config = dict(source.files.config or _config_of_gguf(source))
    config.pop("quantization_config", None)
    config["dtype"] = "bfloat16"
    config.pop("torch_dtype", None)
    groups: dict[tuple[str, int], list[str]] = {}
    ignored = []
    for tensor in tensors:
        module, kind = tensor.name.removesuffix(".weight"), types[tensor.name]
        if kind in _FORMATS:
            size = group_of(tensor.columns) if kind == "W4A16" else 0
            groups.setdefault((kind, size), []).append(module)
        elif len(tensor.shape) == 2 and tensor.role != "table":
            ignored.append(module)
    if config.get("tie_word_embeddings"):
        ignored.append("lm_head")
    kinds = {_FORMATS[kind] for kind, _ in groups}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
        "config_groups": {
            f"group_{place}": {
                "targets": ["Linear"] if len(groups) == 1 else modules,
                "format": _FORMATS[kind],
                **scheme_of(kind, size),
            }
            for place, ((kind, size), modules) in enumerate(groups.items())
        },
        "ignore": sorted(set(ignored)),
    }
    write_whole(folder / "config.json", json.dumps(config, indent=2).encode())


def _config_of_gguf(source: SourceModel) -> dict[str, Any]:
    """Returns a config.json for the model of a GGUF file, where its fields are those of transformers."""
    kind = source.config["model_type"]
    if kind not in ("llama", "qwen2", "qwen3"):
        what = f"A GGUF file of model type {kind} can't be written as a safetensors folder."
        raise QuireError("unsupported_model", what, "Give the original checkpoint, or choose a GGUF type.")
    wanted = (
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "attention_bias",
        "mlp_bias",
        "tie_word_embeddings",
    )
    rope = {key: value for key, value in source.config["rope_parameters"].items() if value is not None}
    if rope["rope_type"] == "default":
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {**{key: source.config[key] for key in wanted}, "rope_parameters": rope, "hidden_act": "silu"}


def _write_tokenizer(source: SourceModel, folder: Path) -> None:
    """Copies the small files beside the weights, or writes those of a GGUF file's tokenizer."""
    if source.file is None:
        for pattern in CONTENT_FILES:
            for path in sorted(source.files.path.glob(pattern)):
                if path.name not in ("config.json", INDEX_NAME) and path.is_file():
                    shutil.copyfile(path, folder / path.name)
        return
    if "tokenizer.ggml.model" not in source.file.metadata:
        return
    from quire.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_gguf(source.file.metadata)
    write_whole(folder / "tokenizer.json", tokenizer.to_json().encode())
    described: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    if tokenizer.chat_template:
        described["chat_template"] = tokenizer.chat_template
    write_whole(folder / "tokenizer_config.json", json.dumps(described, indent=2).encode())
    eos = list(tokenizer.eos_ids)
    if eos:
        write_whole(folder / "generation_config.json", json.dumps({"eos_token_id": eos}).encode())
