"""Model types without a family of their own, which run through transformers with paged attention."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

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
from tests.cpu.families.more_types import small_config

PHI = {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True, "sliding_window": 9}


def draw_ln(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    """Norms by other names; and what scales and shifts all of a layer, without drowning what came before it."""
    scales, shifts = (name.endswith((f"hidden_states_{end}", f"residual_{end}")) for end in ("scale", "bias"))
    draw_wide("norm.weight" if scales else re.sub(r"ln(?=[_\d.])", "norm", name), parameter, generator)
    if shifts:
        parameter.mul_(0.2)


FAMILIES = [
    replace(family, without=frozenset({"float16", "fp8"}))
    for family in (
        Family("apertus", lambda: ApertusConfig(**TINY)),
        Family("gpt2", lambda: GPT2Config(**TINY), draw_ln),
        Family("jetmoe", partial(small_config, "jetmoe"), draw_ln, slow=True),  # looks at numbers before there are any
        Family("opt", lambda: OPTConfig(**TINY, ffn_dim=96, word_embed_proj_dim=64)),
        Family("phimoe", lambda: PhimoeConfig(**TINY, **PHI), draw_sharp),
    )
]
