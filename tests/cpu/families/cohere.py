"""Command-R and Command-R7B: one layer norm, both blocks side by side, neighbours turned; windows without and with.
Command-R+ norms every head of queries and keys by weights of its own. Command A+ has experts in most layers."""

from __future__ import annotations

from typing import Any

from transformers import Cohere2Config, Cohere2MoeConfig, CohereConfig

from tests.cpu.families.experts import draw_sharp
from tests.cpu.families.harness import TINY, Family

TIED = {**TINY, "tie_word_embeddings": True, "pad_token_id": 0}
EXPERTS: dict[str, Any] = {**TIED, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 9, "logit_scale": 0.5,
                           "num_experts": 6, "num_experts_per_tok": 2, "num_shared_experts": 2,
                           "first_k_dense_replace": 1, "sliding_window_pattern": 2,
                           "prefix_dense_intermediate_size": 80}  # fmt: skip

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
    Family("cohere2_moe", lambda: Cohere2MoeConfig(**EXPERTS, expert_selection_fn="sigmoid"), draw_sharp),
    Family(
        "cohere2_moe summed",
        lambda: Cohere2MoeConfig(
            **{**EXPERTS, "first_k_dense_replace": 2},
            rms_norm_eps=1e-3,
            shared_expert_combination_strategy="sum",
            prefix_dense_sliding_window_pattern=2,
        ),
        draw_sharp,
        slow=True,
    ),
    Family(
        "cohere2_moe of plain scores",
        lambda: Cohere2MoeConfig(**EXPERTS, expert_selection_fn="sigmoid", norm_topk_prob=False),
        draw_sharp,
        slow=True,
    ),
]
