"""Mistral and Ministral: a window in every layer, or in some; Ministral 3, whose queries grow with their positions."""

from __future__ import annotations

from transformers import Ministral3Config, MinistralConfig, Mistral3Config, MistralConfig, PixtralVisionConfig

from tests.cpu.families.harness import TINY, Family

MINISTRAL = {"head_dim": 16, "rope_parameters": {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1,
}}  # fmt: skip


def with_tower() -> Mistral3Config:
    tower = PixtralVisionConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
                                image_size=32, patch_size=16)  # fmt: skip
    text = Ministral3Config(**TINY, **MINISTRAL)
    return Mistral3Config(text_config=text, vision_config=tower, tie_word_embeddings=False)


FAMILIES = [
    Family("mistral", lambda: MistralConfig(**TINY, sliding_window=11)),
    Family(
        "ministral",
        lambda: MinistralConfig(
            **TINY, head_dim=16, sliding_window=11, layer_types=["sliding_attention", "full_attention"]
        ),
    ),
    Family("ministral3", lambda: Ministral3Config(**TINY, **MINISTRAL)),
    Family("ministral3 of text and images", with_tower, model_class="Mistral3ForConditionalGeneration"),
]
