"""OLMo Hybrid: gated delta nets whose beta comes up to 2, with attention between them."""

from __future__ import annotations

from typing import Any

from transformers import OlmoHybridConfig

from tests.cpu.families.harness import TINY, Family
from tests.cpu.families.mamba_hybrid import draw

RECURRENT: dict[str, Any] = {"num_hidden_layers": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                             "linear_key_head_dim": 8, "linear_value_head_dim": 12}  # fmt: skip


def as_published() -> Any:
    """Nothing turns. One key head for two value heads."""
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    return OlmoHybridConfig(**{**TINY, **RECURRENT}, layer_types=kinds, rope_parameters={"rope_theta": None})


def turning() -> Any:
    """With rope, biases, and no beta above 1; attention comes last."""
    fields = {**TINY, **RECURRENT, "tie_word_embeddings": True, "attention_bias": True, "rms_norm_eps": 1e-3}
    return OlmoHybridConfig(**fields, linear_allow_neg_eigval=False)


FAMILIES = [
    Family("olmo_hybrid", as_published, draw=draw, slow=True),
    Family("olmo_hybrid turning", turning, draw=draw, slow=True),
]
