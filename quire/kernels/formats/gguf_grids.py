"""GGUF's types of one to three bits: eight, or four, numbers at a time are a place in a grid of hundreds, which the
package `gguf` knows and nobody could work out. `dequant` lists them; they are decoded while a file is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from quire.types import QuireError

SIZES = {"IQ1_S": 50, "IQ1_M": 56, "IQ2_XXS": 66, "IQ2_XS": 74, "IQ2_S": 82, "IQ3_XXS": 98, "IQ3_S": 110}  # in bytes
ELEMENTS = 256


def grid_decoder(type_name: str) -> Callable[[Tensor], Tensor]:
    """[blocks, bytes] uint8 -> [blocks, elements] float32"""
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
