"""Model types without a file of their own, which run through transformers with their attention swapped."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import (
    ApertusConfig,
    GPT2Config,
    OPTConfig,
    PhimoeConfig,
)

from tests.cpu.families.experts import draw_sharp
from tests.cpu.families.harness import TINY, Family, draw_wide

PHI = {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True, "sliding_window": 9}


def draw_ln(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    draw_wide(name.replace("ln_", "norm_"), parameter, generator)


FAMILIES = [
    replace(family, without=frozenset({"float16", "fp8"}))
    for family in (
        Family("apertus", lambda: ApertusConfig(**TINY)),
        Family("gpt2", lambda: GPT2Config(**TINY), draw_ln),
        Family("opt", lambda: OPTConfig(**TINY, ffn_dim=96, word_embed_proj_dim=64)),
        Family("phimoe", lambda: PhimoeConfig(**TINY, **PHI), draw_sharp),
    )
]
