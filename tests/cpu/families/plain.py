"""Families that differ from Llama by little: a bias, an activation, a norm, a multiplier, layers that do not turn."""

from __future__ import annotations

from transformers import (
    ArceeConfig,
    CwmConfig,
    Ernie4_5Config,
    Exaone4Config,
    GraniteConfig,
    GraniteSWAConfig,
    HeliumConfig,
    HyperCLOVAXConfig,
    Jais2Config,
    NemotronConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from tests.cpu.families.gemma import draw_around_zero
from tests.cpu.families.harness import TINY, Family
from tests.cpu.families.llama import ROPE_LLAMA3

FOUR_LAYERS = {**TINY, "num_hidden_layers": 4}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}

FAMILIES = [
    Family("arcee", lambda: ArceeConfig(**TINY)),
    Family("cwm", lambda: CwmConfig(**FOUR_LAYERS, head_dim=16, sliding_window=9, rope_parameters=ROPE_LLAMA3)),
    Family("ernie4_5", lambda: Ernie4_5Config(**TINY, head_dim=16, use_bias=True)),
    Family("exaone4", lambda: Exaone4Config(**FOUR_LAYERS, sliding_window=9)),
    Family("granite", lambda: GraniteConfig(**TINY, **MULTIPLIERS)),
    Family(
        "granite_swa",
        lambda: GraniteSWAConfig(**FOUR_LAYERS, **MULTIPLIERS, sliding_window=9, layer_rope_theta=[0, 100, 10000, 100]),
    ),
    Family("helium", lambda: HeliumConfig(**TINY, head_dim=16)),
    Family("hyperclovax", lambda: HyperCLOVAXConfig(**TINY, **MULTIPLIERS)),
    Family("hyperclovax no norms behind", lambda: HyperCLOVAXConfig(**TINY, use_post_norm=False), slow=True),
    Family("jais2", lambda: Jais2Config(**TINY)),
    Family("nemotron", lambda: NemotronConfig(**TINY), draw_around_zero),
    Family("seed_oss", lambda: SeedOssConfig(**TINY, head_dim=16, attention_out_bias=True)),
    Family("smollm3", lambda: SmolLM3Config(**{**FOUR_LAYERS, "pad_token_id": 0})),
    Family("stablelm", lambda: StableLmConfig(**TINY, use_qkv_bias=True)),
    Family("stablelm parallel", lambda: StableLmConfig(**TINY, use_parallel_residual=True)),
    Family("stablelm heads normed", lambda: StableLmConfig(**TINY, use_parallel_residual=True, qk_layernorm=True)),
    Family("starcoder2", lambda: Starcoder2Config(**TINY, sliding_window=14)),
]
