"""Command-R and Command-R7B: one layer norm, both blocks side by side, neighbours turned; windows without and with."""

from __future__ import annotations

from transformers import Cohere2Config, CohereConfig

from tests.cpu.families.harness import TINY, Family

FAMILIES = [
    Family("cohere", lambda: CohereConfig(**{**TINY, "tie_word_embeddings": True, "pad_token_id": 0}, logit_scale=0.5)),
    Family(
        "cohere2",
        lambda: Cohere2Config(
            **{**TINY, "tie_word_embeddings": True, "num_hidden_layers": 4, "pad_token_id": 0},
            sliding_window=9,
            logit_scale=0.5,
        ),
    ),
]
