"""LFM2: convolutions between gates, and attention; with experts in most layers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from tests.cpu.families.harness import TINY, Family, draw_wide

# Which layers attend is said in both of the ways that configs have for it.
SIZES = {**TINY, "num_hidden_layers": 3, "pad_token_id": 0, "tie_word_embeddings": True}


def draw(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    """Taps and gates that make something of what lies before a token."""
    draw_wide(name, parameter, generator)
    if ".conv." in name:
        parameter.mul_(3.0)


def lfm2() -> Any:
    """With a feed-forward block whose width is two thirds of what is said, rounded up."""
    return transformers.Lfm2Config(**SIZES, full_attn_idxs=[1], block_multiple_of=16)


def lfm2_biased() -> Any:
    """With biases, more taps, a head of its own, and the width as it is said."""
    sizes = {**SIZES, "tie_word_embeddings": False}
    return transformers.Lfm2Config(**sizes, layer_types=["conv", "conv", "full_attention"], conv_bias=True,
                                   conv_L_cache=5, block_auto_adjust_ff_dim=False)  # fmt: skip


def lfm2_moe() -> Any:
    return transformers.Lfm2MoeConfig(**SIZES, layer_types=["conv", "full_attention", "conv"], num_dense_layers=1,
                                      num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24,
                                      routed_scaling_factor=1.5)  # fmt: skip


FAMILIES = [
    Family("lfm2", lfm2, draw=draw),
    Family("lfm2 biased", lfm2_biased, draw=draw, slow=True),
    Family("lfm2_moe", lfm2_moe, draw=draw),
]
