"""Command-R and Command-R7B: one layer norm, both blocks side by side, neighbours turned; windows without and with.
Command-R+ norms every head of queries and keys by weights of its own."""

from __future__ import annotations

from transformers import Cohere2Config, CohereConfig

from tests.cpu.families.harness import TINY, Family

TIED = {**TINY, "tie_word_embeddings": True, "pad_token_id": 0}

FAMILIES = [
    Family("cohere", lambda: CohereConfig(**TIED, logit_scale=0.5)),
    Family("cohere heads normed", lambda: CohereConfig(**TIED, logit_scale=0.5, use_qk_norm=True)),
    Family(
        "cohere2",
        lambda: Cohere2Config(
            **{**TIED, "num_hidden_layers": 4},
            sliding_window=9,
            logit_scale=0.5,
        ),
    ),
]
