"""Phi-1 and 2 (parallel blocks), Phi-3 and 4: merged projections, partial rope, longrope."""

from __future__ import annotations

from transformers import Phi3Config, PhiConfig

from tests.cpu.families.harness import TINY, Family

LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0] * 6,
    "long_factor": [1.0, 1.1, 1.5, 2.0, 4.0, 9.0],
}

FAMILIES = [
    Family("phi", lambda: PhiConfig(**TINY)),
    Family("phi heads normed", lambda: PhiConfig(**TINY, qk_layernorm=True)),
    Family("phi3", lambda: Phi3Config(**TINY, sliding_window=13)),
    # transformers changes factors with the length of what it is given; beyond 2 tokens it is the long ones, always.
    Family("phi4", lambda: Phi3Config(**TINY, rope_parameters=LONG, original_max_position_embeddings=2)),
]
