"""GLM-4 of both generations: half of each head turned, as neighbours; norms behind the blocks in the second."""

from __future__ import annotations

from transformers import Glm4Config, GlmConfig

from tests.cpu.families.harness import TINY, Family

FAMILIES = [
    Family("glm", lambda: GlmConfig(**TINY, head_dim=16, attention_bias=True)),
    Family("glm4", lambda: Glm4Config(**TINY, head_dim=16, attention_bias=True)),
]
