"""Mistral and Ministral: a window in every layer, or in some."""

from __future__ import annotations

from transformers import MinistralConfig, MistralConfig

from tests.cpu.families.harness import TINY, Family

FAMILIES = [
    Family("mistral", lambda: MistralConfig(**TINY, sliding_window=11)),
    Family(
        "ministral",
        lambda: MinistralConfig(
            **TINY, head_dim=16, sliding_window=11, layer_types=["sliding_attention", "full_attention"]
        ),
    ),
]
