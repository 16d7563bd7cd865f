"""GGUF files with random weights in the shapes of models that people run, for `quire bench compare-llama-cpp`.

A file's speed depends on its sizes and types, not on its values. The tokenizer is that of a given GGUF file, so both
engines can load the result. Tensors are written one at a time, so that a file larger than memory can be made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.types import QuireError


@dataclass(frozen=True, slots=True)
class RandomShape:
    """The sizes of a decoder."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_width: int
    num_experts: int = 0  # 0: one feed-forward block per layer
    top_k: int = 0
    arch: str = "llama"
    qk_norm: bool = False
    tied: bool = True


SHAPES = {
    "0.8b": RandomShape(16, 2048, 32, 8, 64, 5632),
    "3b": RandomShape(28, 3072, 24, 8, 128, 8192),
    "8b": RandomShape(32, 4096, 32, 8, 128, 14336, tied=False),
    # The layers of Qwen3 30B-A3B, an eighth of them.
    "qwen3-moe": RandomShape(6, 2048, 32, 4, 128, 768, num_experts=128, top_k=8, arch="qwen3moe", qk_norm=True),
}
# The types of a file's matrices, as llama.cpp's own mixtures have them: most, those that are more sensitive, the head.
MIXTURES = {
    "Q4_K_M": ("Q4_K", "Q6_K", "Q6_K"),
    "Q5_K_M": ("Q5_K", "Q6_K", "Q6_K"),
    "Q6_K": ("Q6_K", "Q6_K", "Q6_K"),
    "Q8_0": ("Q8_0", "Q8_0", "Q8_0"),
    "Q4_0": ("Q4_0", "Q4_0", "Q6_K"),
    "Q4_1": ("Q4_1", "Q4_1", "Q6_K"),
    "IQ4_XS": ("IQ4_XS", "Q5_K", "Q6_K"),
}
CONTEXT = 8192


def make_random_gguf(shape_name: str, mixture: str, tokenizer: Path, target: Path, seed: int = 0) -> None:
    """Writes a file of this shape and mixture to `target`. `tokenizer`: a GGUF file whose tokenizer is taken over."""
    if shape_name not in SHAPES or mixture not in MIXTURES:
        what = f"There is no shape {shape_name} in {mixture}."
        hint = f"Shapes are {', '.join(SHAPES)}; types are {', '.join(MIXTURES)}."
        raise QuireError("usage", what, hint, param="shape")
    try:
        import gguf
    except ImportError:
        raise QuireError(
            "missing_package", "Making a file needs the Python package gguf.", "pip install gguf"
        ) from None
    import torch

    from quire.kernels.formats.random_blocks import random_blocks

    shape, part = SHAPES[shape_name], target.with_suffix(".part")
    writer = gguf.GGUFWriter(part, shape.arch)
    vocab_size = _copy_tokenizer(gguf, tokenizer, writer)
    _add_sizes(writer, shape, shape_name)
    tensors = list(_list_tensors(shape, mixture, vocab_size))
    import numpy as np

    for name, size, form in tensors:
        kind = gguf.GGMLQuantizationType[form]
        if form == "F32":
            writer.add_tensor_info(name, size, np.dtype(np.float32), 4 * _count(size))
            continue
        bytes_shape = gguf.quants.quant_shape_to_byte_shape(size, kind)
        writer.add_tensor_info(name, bytes_shape, np.dtype(np.uint8), _count(bytes_shape), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = torch.Generator().manual_seed(seed)
    for name, size, form in tensors:
        if form == "F32":
            ones = name.endswith("norm.weight")
            data = torch.ones(size) if ones else torch.randn(size, generator=generator) * shape.width**-0.5
        else:
            columns = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[form]][0]
            data = random_blocks(form, _count(size) // columns, generator, std=size[-1] ** -0.5)
        writer.write_tensor_data(data.numpy())
    writer.close()
    part.replace(target)


def _copy_tokenizer(gguf: Any, source: Path, writer: Any) -> int:
    """Copies the tokenizer's fields of a GGUF file; returns the number of its tokens."""
    reader = gguf.GGUFReader(source)
    for field in reader.fields.values():
        if field.name.startswith("tokenizer."):
            kind = field.types[0]
            sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=sub_type)
    return len(reader.fields["tokenizer.ggml.tokens"].data)


def _add_sizes(writer: Any, shape: RandomShape, name: str) -> None:
    writer.add_name(f"random weights, {name}")
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.inner_width)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if shape.num_experts:
        writer.add_expert_count(shape.num_experts)
        writer.add_expert_used_count(shape.top_k)
        writer.add_expert_feed_forward_length(shape.inner_width)


def _list_tensors(shape: RandomShape, mixture: str, vocab_size: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yields every tensor as (name, size, type). Sizes have the columns last, as in torch."""
    most, sensitive, head = MIXTURES[mixture]
    width, q_width, kv_width = shape.width, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "token_embd.weight", (vocab_size, width), head if shape.tied else most
    yield "output_norm.weight", (width,), "F32"
    if not shape.tied:
        yield "output.weight", (vocab_size, width), head
    experts = (shape.num_experts,) if shape.num_experts else ()
    ending = "_exps.weight" if experts else ".weight"
    for layer in range(shape.num_layers):
        block, better = f"blk.{layer}.", sensitive if _takes_more_bits(layer, shape.num_layers) else most
        yield f"{block}attn_norm.weight", (width,), "F32"
        yield f"{block}attn_q.weight", (q_width, width), most
        yield f"{block}attn_k.weight", (kv_width, width), most
        yield f"{block}attn_v.weight", (kv_width, width), better
        yield f"{block}attn_output.weight", (width, q_width), most
        if shape.qk_norm:
            yield f"{block}attn_q_norm.weight", (shape.head_dim,), "F32"
            yield f"{block}attn_k_norm.weight", (shape.head_dim,), "F32"
        yield f"{block}ffn_norm.weight", (width,), "F32"
        if experts:
            yield f"{block}ffn_gate_inp.weight", (shape.num_experts, width), "F32"
        yield f"{block}ffn_gate{ending}", (*experts, shape.inner_width, width), most
        yield f"{block}ffn_up{ending}", (*experts, shape.inner_width, width), most
        yield f"{block}ffn_down{ending}", (*experts, width, shape.inner_width), better


def _takes_more_bits(layer: int, num_layers: int) -> bool:
    """Whether a mixture gives the sensitive matrices of a layer more bits: in the first and the last eighth, and in
    every third layer between them."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _count(size: tuple[int, ...]) -> int:
    count = 1
    for each in size:
        count *= each
    return count
