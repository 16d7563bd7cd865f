"""Configs with the sizes of published models and a few of their layers: what decides which kernels they launch."""

from __future__ import annotations

from typing import Any

import transformers

QWEN3: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
                         "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 2, "vocab_size": 151936,
                         "tie_word_embeddings": True}  # fmt: skip
EXPERTS: dict[str, Any] = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
                           "num_experts_per_tok": 8, "moe_intermediate_size": 768,
                           "tie_word_embeddings": False}  # fmt: skip
LATENTS: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
                           "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 16,
                           "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
                           "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
                           "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 102400, "topk_method": "greedy",
                           "n_group": 1, "topk_group": 1, "max_position_embeddings": 16384}  # fmt: skip
GEMMA3: dict[str, Any] = {"vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 6,
                          "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                          "sliding_window": 1024}  # fmt: skip
NEMOTRON: dict[str, Any] = {"vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504,
                            "hybrid_override_pattern": "M-M*-", "num_attention_heads": 32, "num_key_value_heads": 8,
                            "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128,
                            "n_groups": 8, "conv_kernel": 4, "max_position_embeddings": 8192}  # fmt: skip


def published_shapes() -> dict[str, Any]:
    return {
        "Qwen3-0.6B": transformers.Qwen3Config(**QWEN3),
        "Qwen3-30B-A3B": transformers.Qwen3MoeConfig(**{**QWEN3, **EXPERTS}),
        "Qwen3-Next": transformers.Qwen3NextConfig(num_hidden_layers=4),
        "gpt-oss-20b": transformers.GptOssConfig(num_hidden_layers=2, num_local_experts=32),
        "DeepSeek-V2-Lite": transformers.DeepseekV2Config(**LATENTS),
        "Gemma 3 4B": transformers.Gemma3TextConfig(**GEMMA3),
        "Nemotron-H-8B": transformers.NemotronHConfig(**NEMOTRON),
        "Kimi-Linear-48B-A3B": transformers.KimiLinearConfig(num_hidden_layers=5),
    }
