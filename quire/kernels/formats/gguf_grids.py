"""Decodes GGUF's grid types (one to three bits), whose codes index fixed grids of eight or four values each.

The grids come from the package `gguf`. `gguf_blocks.FORMATS` lists these types; they are dequantized at load.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from quire.types import QuireError

# Bytes of a block.
SIZES = {"IQ1_S": 50, "IQ1_M": 56, "IQ2_XXS": 66, "IQ2_XS": 74, "IQ2_S": 82, "IQ3_XXS": 98, "IQ3_S": 110}
ELEMENTS = 256


def grid_decoder(type_name: str) -> Callable[[Tensor], Tensor]:
    """Returns the decoder of a grid type: [blocks, bytes] uint8 -> [blocks, elements] float32."""
    return partial(_decode, type_name)


def _decode(type_name: str, blocks: Tensor) -> Tensor:
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        what = f"Tensors of the type {type_name} are decoded by the package gguf, which is not installed."
        raise QuireError(
            "missing_package", what, "Install it: pip install gguf, or quire with its extra grids."
        ) from None
    decoded = dequantize(blocks.cpu().numpy(), GGMLQuantizationType[type_name])
    return torch.from_numpy(decoded).to(blocks.device)
