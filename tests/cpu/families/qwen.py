"""Qwen2, Qwen2.5 with its windows in the upper layers, Qwen3."""

from __future__ import annotations

from transformers import Qwen2Config, Qwen3Config

from tests.cpu.families.harness import TINY, Family

WINDOWS = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}


class MiMoConfig(Qwen2Config):
    """transformers has no such type: published files bring Qwen2's architecture with layers for several tokens."""

    model_type = "mimo"


FAMILIES = [
    Family("qwen2", lambda: Qwen2Config(**TINY)),
    Family("qwen2 windows", lambda: Qwen2Config(**TINY, **WINDOWS)),
    Family("mimo", lambda: MiMoConfig(**TINY, head_dim=16), model_class="Qwen2ForCausalLM"),
    Family("qwen3", lambda: Qwen3Config(**TINY, head_dim=32)),  # heads * head_dim is not the width
]
