"""Model types without a file of their own, which run through transformers with their attention swapped."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import (
    ApertusConfig,
    GPT2Config,
    GPTNeoXConfig,
    HunYuanDenseV1Config,
    OPTConfig,
    VaultGemmaConfig,
)

from tests.cpu.families.gemma import HEADS, draw_around_zero
from tests.cpu.families.harness import TINY, Family, draw_wide

CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}


def draw_ln(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    draw_wide(name.replace("ln_", "norm_"), parameter, generator)


FAMILIES = [
    replace(family, without=frozenset({"float16", "fp8"}))
    for family in (
        Family("apertus", lambda: ApertusConfig(**TINY)),
        Family("gpt2", lambda: GPT2Config(**TINY), draw_ln),
        Family("gpt_neox", lambda: GPTNeoXConfig(**TINY)),
        Family("hunyuan_v1_dense", lambda: HunYuanDenseV1Config(**TINY, head_dim=16)),
        Family("opt", lambda: OPTConfig(**TINY, ffn_dim=96, word_embed_proj_dim=64)),
        Family("vaultgemma", lambda: VaultGemmaConfig(**TINY, **HEADS, **CAPS, sliding_window=9), draw_around_zero),
    )
]
