"""Tensors that published checkpoints keep packed, beside the scales that make them numbers again: which of a file's
tensors are such pairs, what each stands for, and how its rows are decoded. `shards` reads them as if they were floats.

MXFP4: `X_blocks` and `X_scales`, bytes (gpt-oss). FP8: `X` and `X_scale_inv`, or `X_scale`, with a scale for each block
of so many rows and columns, as config.json says, or one for all of it (DeepSeek V3, Kimi K2, MiniMax M2, what Qwen
publishes in FP8). Neither activations nor caches are rounded by a file's scales, so those for them are of no use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from quire.files.safetensors import TensorEntry
from quire.kernels.dequant import dequantize_fp8, dequantize_mxfp4
from quire.types import QuireError

MXFP4_BYTES = 16  # of a block of 32 numbers
FP8 = "F8_E4M3"
FP8_SCALES = ("F32", "BF16", "F16", "F8_E8M0")
FP8_FORMATS = ("e4m3", "float8_e4m3fn")  # two names of one
USELESS = ("activation_scale", "input_scale", "k_scale", "v_scale")

Block = tuple[int, int]  # rows and columns that share a scale
WHOLE: Block = (1 << 62, 1 << 62)  # all of a matrix does
# Rows, their scales, and how many rows before these have the first of them -> [rows, columns] float32.
Decode = Callable[[Tensor, Tensor, int], Tensor]


@dataclass(frozen=True, slots=True)
class Packed:
    shape: tuple[int, ...]  # of what it stands for
    scales: str  # the name of; one for a whole matrix may be written without its dimensions
    rows: int  # that share a row of scales
    decode: Decode

    @property
    def is_scaled_whole(self) -> bool:
        return self.rows == WHOLE[0]


def read_fp8_block(hf_config: Mapping[str, Any]) -> Block | None:
    """How a checkpoint in FP8 shares its scales; None: it is not in FP8. What is quantized otherwise is refused, but
    for MXFP4, whose tensors say all there is to know."""
    quantized = hf_config.get("quantization_config")
    method = quantized.get("quant_method", "an unknown method") if isinstance(quantized, dict) else quantized
    if not quantized or method == "mxfp4":
        return None
    if method != "fp8" or not isinstance(quantized, dict):
        what = f"This checkpoint is quantized ({method}), which is not supported."
        raise QuireError("unsupported_model", what, "Use the original checkpoint, one in FP8, or a GGUF file.")
    if quantized.get("fmt", "e4m3") not in FP8_FORMATS:
        what = f"This checkpoint is in FP8 of the format {quantized['fmt']!r}, which is not supported."
        raise QuireError("unsupported_model", what, "Use the original checkpoint, or one in the format e4m3.")
    block = quantized.get("weight_block_size")
    if block is None:
        return WHOLE
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        what = f"weight_block_size in config.json is {block!r}, where two whole numbers above 0 are needed."
        raise QuireError("bad_config", what, "Give rows and columns, such as [128, 128].")
    return block[0], block[1]


def has_mxfp4(hf_config: Mapping[str, Any]) -> bool:
    quantized = hf_config.get("quantization_config")
    return isinstance(quantized, dict) and quantized.get("quant_method") == "mxfp4"


def find_packed(entries: Mapping[str, TensorEntry], block: Block | None) -> dict[str, Packed]:
    """Those of a file's tensors that are, by name. `block`: of tensors in FP8; None: there should be none."""
    found = {}
    for name, entry in entries.items():
        if name.endswith("_blocks"):
            scales = name.removesuffix("_blocks") + "_scales"
            if _is_mxfp4(entry, entries.get(scales)):
                *outer, num_blocks, num_bytes = entry.shape
                shape = (*outer, 2 * num_blocks * num_bytes)
                found[name] = Packed(shape, scales, 1, _decode_mxfp4)
        elif entry.dtype == FP8 and block is not None and len(entry.shape) in (2, 3):
            scales = next((f"{name}{end}" for end in ("_scale_inv", "_scale") if f"{name}{end}" in entries), "")
            _check_scales(name, entry, scales, entries.get(scales), block)
            found[name] = Packed(entry.shape, scales, block[0], partial(dequantize_fp8, block=block))
    return found


def is_useless(name: str, packed: Mapping[str, Packed]) -> bool:
    """A scale for what is not rounded here."""
    return bool(packed) and name.rpartition(".")[2] in USELESS


def _is_mxfp4(blocks: TensorEntry, scales: TensorEntry | None) -> bool:
    if scales is None or not blocks.dtype == scales.dtype == "U8":
        return False
    return blocks.shape == (*scales.shape, MXFP4_BYTES)


def _decode_mxfp4(blocks: Tensor, scales: Tensor, first: int) -> Tensor:
    return dequantize_mxfp4(blocks, scales)


def _check_scales(name: str, entry: TensorEntry, named: str, scales: TensorEntry | None, block: Block) -> None:
    """`named`: what the scales are called, if there are any."""
    hint = "The weights do not belong to this config; fetch both again."
    if scales is None:
        raise QuireError("bad_weights", f"{name} is in FP8, but there is neither {name}_scale_inv nor _scale.", hint)
    *outer, rows, columns = entry.shape
    wanted = (*outer, -(-rows // block[0]), -(-columns // block[1]))
    written = scales.shape
    if block == WHOLE:  # one number, with dimensions or without
        written = (*written, *[1] * (len(wanted) - len(written)))
    if written != wanted or scales.dtype not in FP8_SCALES:
        blocks = "one scale for each matrix" if block == WHOLE else f"scales for blocks of {block[0]} x {block[1]}"
        what = f"{named} is {scales.dtype} {list(scales.shape)}, where {list(entry.shape)} with {blocks}"
        raise QuireError("bad_weights", f"{what} needs {' or '.join(FP8_SCALES)} {list(wanted)}.", hint)
