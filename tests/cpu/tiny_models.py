"""Tiny random checkpoints of every dense family, made with transformers, which is also what they are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

FAMILIES = ("llama", "llama3", "qwen2", "qwen3", "mistral", "smollm2")

_COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# family -> (transformers class, what differs from the common config)
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": _ROPE_LLAMA3}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),  # heads * head_dim is not the width
    "mistral": ("Mistral", {"sliding_window": 11}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    ),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "num_attention_heads": 6, "hidden_size": 96}),
}


def make_tiny(family: str, folder: Path, **overrides: Any) -> tuple[Any, Path]:
    """A float32 checkpoint in `folder` (config.json and safetensors) and the transformers model it was saved from.

    `seed` is an override like any config field. Weights are drawn wide, biases and norms away from their neutral
    values: logits then differ clearly from token to token, and a forgotten bias or norm shows.
    """
    seed = overrides.pop("seed", 0)
    class_name, fields = _FAMILIES[family]
    config = getattr(transformers, f"{class_name}Config")(**{**_COMMON, **fields, **overrides})
    model = getattr(transformers, f"{class_name}ForCausalLM")(config).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name
            parameter.normal_(1.0 if is_norm else 0.0, 0.3 if is_norm else 0.15, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    return model, folder
