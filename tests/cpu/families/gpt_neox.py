"""GPT-NeoX and Persimmon: each head's query, key and value in one matrix, biases, a part of each head turned; both
blocks side by side, each with a norm of its own, or one after the other."""

from __future__ import annotations

from transformers import GPTNeoXConfig, PersimmonConfig

from tests.cpu.families.harness import TINY, Family

FAMILIES = [
    Family("gpt_neox", lambda: GPTNeoXConfig(**TINY, rotary_emb_base=500, rotary_pct=0.5)),
    Family(
        "gpt_neox in turn",
        lambda: GPTNeoXConfig(**TINY, use_parallel_residual=False, attention_bias=False),
        slow=True,
    ),
    Family("persimmon", lambda: PersimmonConfig(**TINY)),
    Family(
        "persimmon heads as they are",
        lambda: PersimmonConfig(**TINY, qk_layernorm=False, hidden_act="gelu_fast"),
        slow=True,
    ),
]
