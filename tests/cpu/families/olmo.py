"""OLMo 1 (norms without weights, later ones clipped), 2 (norms behind the blocks, queries and keys normed in full), 3
(windows)."""

from __future__ import annotations

from transformers import Olmo2Config, Olmo3Config, OlmoConfig

from tests.cpu.families.harness import TINY, Family

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}

FAMILIES = [
    Family("olmo", lambda: OlmoConfig(**TINY)),
    Family("olmo clipped", lambda: OlmoConfig(**TINY, clip_qkv=0.7)),
    Family("olmo2", lambda: Olmo2Config(**TINY)),
    Family("olmo3", lambda: Olmo3Config(**{**TINY, "num_hidden_layers": 4}, sliding_window=10, rope_parameters=ROPES)),
]
