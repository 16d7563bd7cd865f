"""Llama 2 and 3, SmolLM2."""

from __future__ import annotations

from transformers import LlamaConfig

from tests.cpu.families.harness import TINY, Family

ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FAMILIES = [
    Family("llama", lambda: LlamaConfig(**TINY)),
    Family("llama3", lambda: LlamaConfig(**TINY, rope_parameters=ROPE_LLAMA3)),
    Family("smollm2", lambda: LlamaConfig(**{**TINY, "tie_word_embeddings": True, "hidden_size": 96})),
]
