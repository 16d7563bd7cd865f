"""Random weights in GGUF's block types, for benchmarks and tests that need a file's sizes and speeds but no model.

Values have mean 0, about, and the requested standard deviation. `sources.RandomFill` and `bench.random_gguf` call it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.formats.gguf_blocks import FORMATS, dequantize

# Offsets in a block of the scale and of the least value, float16 each, and the least value in scales that makes the
# mean 0.
_HALVES: dict[str, tuple[int, int | None, float]] = {
    "Q8_0": (0, None, 0),
    "Q4_0": (0, None, 0),
    "Q4_1": (0, 2, -7.5),
    "Q5_0": (0, None, 0),
    "Q5_1": (0, 2, -15.5),
    "IQ4_NL": (0, None, 0),
    "IQ4_XS": (0, None, 0),
    "Q2_K": (80, 82, 1.5),
    "Q3_K": (108, None, 0),
    "Q4_K": (0, 2, 7.5),
    "Q5_K": (0, 2, 15.5),
    "Q6_K": (208, None, 0),
}
_SAMPLE = 64  # blocks that are decoded to find the scale


def random_blocks(type_name: str, count: int, generator: torch.Generator, std: float = 0.02) -> Tensor:
    """Returns `count` blocks of random values, [bytes] uint8. Raises KeyError for a type without a recipe."""
    size = FORMATS[type_name].num_bytes
    blocks = torch.randint(256, (max(count, _SAMPLE), size), dtype=torch.uint8, generator=generator)
    if type_name == "MXFP4":
        blocks[:, 0] = 127 + round(torch.tensor(std / 3).log2().item())
        return blocks[:count].view(-1)
    if type_name in ("Q4_K", "Q5_K"):  # the least value of each cell is its scale
        blocks[:, 8:12] = blocks[:, 4:8]
        blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17
    elif type_name == "Q2_K":
        blocks[:, :16] = (blocks[:, :16] & 15) * 17
    _set_halves(blocks, type_name, 1.0)
    spread = dequantize(blocks[:_SAMPLE].reshape(-1), type_name).std().item()
    _set_halves(blocks, type_name, std / spread)
    return blocks[:count].reshape(-1)


def _set_halves(blocks: Tensor, type_name: str, scale: float) -> None:
    scale_at, least_at, least = _HALVES[type_name]
    blocks[:, scale_at : scale_at + 2] = torch.tensor([scale], dtype=torch.float16).view(torch.uint8)
    if least_at is not None:
        blocks[:, least_at : least_at + 2] = torch.tensor([scale * least], dtype=torch.float16).view(torch.uint8)
