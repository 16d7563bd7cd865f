"""Mixtures of experts: with ordinary attention, gpt-oss with its sinks, DeepSeek with its latents. MiniCPM 3 and Youtu
have the latents alone."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    AfmoeConfig,
    AriaConfig,
    AriaTextConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    ExaoneMoeConfig,
    FlexOlmoConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteMoeConfig,
    GraniteMoeSharedConfig,
    GraniteMoeSWAConfig,
    HYV3Config,
    MellumConfig,
    MiniCPM3Config,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SolarOpenConfig,
    YoutuConfig,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from tests.cpu.families.harness import TINY, Family, draw_wide

QWEN: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
GROUPS: dict[str, Any] = {"n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
                          "n_shared_experts": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}  # fmt: skip
# Said twice: not every version of transformers looks at `rotary_dim`.
HALF_TURNED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LATENT: dict[str, Any] = {**TINY, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
                          "qk_nope_head_dim": 24, "v_head_dim": 20}  # fmt: skip
SOLAR = {name: value for name, value in {**TINY, **GROUPS}.items()
         if name not in ("intermediate_size", "first_k_dense_replace")}  # fmt: skip
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.2,
                        "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}  # fmt: skip
STRETCHED: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "truncate": False,
                             "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
ERNIE: dict[str, Any] = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1}
GRANITE: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2, "embedding_multiplier": 3.0,
                           "logits_scaling": 0.5, "residual_multiplier": 0.6, "attention_multiplier": 0.2}  # fmt: skip
KIMI: dict[str, Any] = {**LATENT, **GROUPS, "n_routed_experts": 16, "n_group": 1, "topk_group": 1,
                        "n_shared_experts": 1, "q_lora_rank": 28, "routed_scaling_factor": 2.827}  # fmt: skip
AFMOE: dict[str, Any] = {**TINY, **QWEN, "num_hidden_layers": 3, "head_dim": 32, "sliding_window": 9,
                         "global_attn_every_n_layers": 2, "route_scale": 1.7, "num_shared_experts": 1}  # fmt: skip
ARIA: dict[str, Any] = {**TINY, "moe_num_experts": 6, "moe_topk": 3, "model_type": "aria_text"}
EYES = {"model_type": "idefics3_vision", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 4}  # fmt: skip
GRANITE_SWA: dict[str, Any] = {**TINY, **GRANITE, "num_hidden_layers": 4, "sliding_window": 9,
                               "layer_rope_theta": [0, 100, 10000, 100]}  # fmt: skip
MELLUM: dict[str, Any] = {**TINY, **QWEN, "num_hidden_layers": 3, "head_dim": 32, "sliding_window": 9,
                          "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                          "mlp_layer_types": ["sparse", "sparse", "dense"]}  # fmt: skip
SPEEDS = {"full_attention": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                             "original_max_position_embeddings": 32},
          "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}  # fmt: skip
MINICPM: dict[str, Any] = {"q_lora_rank": 28, "scale_emb": 3.0, "scale_depth": 0.7, "dim_model_base": 24}
# transformers changes factors with the length of what it is given; beyond 2 tokens it is the long ones, always.
LONG: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 2,
                        "short_factor": [1.0] * 8, "long_factor": [1.0, 1.1, 1.5, 2.0, 4.0, 9.0, 1.0, 3.0]}  # fmt: skip
# Older versions of transformers ask a MiniCPM 3 config for a factor, which published files lack.
KNOWS_LONGROPE = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
KIMI_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}


class KimiK2Config(DeepseekV3Config):
    """transformers has no such type: published files bring DeepSeek V3's config class and call it this."""

    model_type = "kimi_k2"


conversions = get_checkpoint_conversion_mapping("deepseek_v3")  # experts are saved one by one, as they are published
register_checkpoint_conversion_mapping("kimi_k2", conversions, overwrite=True)


def draw_sharp(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    """Routers wide apart, so that no choice is a near tie; biases that change choices."""
    draw_wide(name, parameter, generator)
    if name.endswith(("gate.weight", "router.weight")):
        parameter.mul_(4.0)


FAMILIES = [
    Family("qwen3_moe", lambda: Qwen3MoeConfig(**TINY, **QWEN, head_dim=32, norm_topk_prob=True, mlp_only_layers=[1]),
           draw_sharp),
    Family("qwen2_moe", lambda: Qwen2MoeConfig(**TINY, **QWEN, shared_expert_intermediate_size=40), draw_sharp),
    Family("mixtral", lambda: MixtralConfig(**TINY, num_local_experts=4), draw_sharp),
    Family("olmoe", lambda: OlmoeConfig(**TINY, num_experts=8, num_experts_per_tok=3), draw_sharp),
    Family("olmoe clipped", lambda: OlmoeConfig(**TINY, num_experts=8, num_experts_per_tok=3, clip_qkv=0.7),
           draw_sharp),
    Family("dots1", lambda: Dots1Config(**TINY, **GROUPS, head_dim=16, sliding_window=9, max_window_layers=1),
           draw_sharp),
    Family("glm4_moe", lambda: Glm4MoeConfig(**TINY, **GROUPS, head_dim=32, use_qk_norm=True, attention_bias=True),
           draw_sharp),
    Family("minimax_m2", lambda: MiniMaxM2Config(**TINY, num_local_experts=8, num_experts_per_tok=3, head_dim=32,
                                                 rotary_dim=16, rope_parameters=HALF_TURNED), draw_sharp),
    Family("gpt_oss", lambda: GptOssConfig(**TINY, num_local_experts=6, num_experts_per_tok=2, head_dim=16,
                                           sliding_window=8, rope_parameters=STRETCHED), draw_sharp),
    Family("deepseek_v2", lambda: DeepseekV2Config(**LATENT, **GROUPS, topk_method="group_limited_greedy",
                                                   q_lora_rank=None, routed_scaling_factor=1.5, rope_parameters=YARN),
           draw_sharp),
    Family("deepseek_v3", lambda: DeepseekV3Config(**LATENT, **GROUPS, q_lora_rank=28), draw_sharp),
    Family("kimi_k2", lambda: KimiK2Config(**KIMI, rope_parameters=KIMI_YARN), draw_sharp, "DeepseekV3ForCausalLM"),
    Family("glm4_moe_lite", lambda: Glm4MoeLiteConfig(**LATENT, **GROUPS, q_lora_rank=28), draw_sharp),
    Family("afmoe", lambda: AfmoeConfig(**AFMOE, mup_enabled=True), draw_sharp),
    Family("aria_text", lambda: AriaTextConfig(**ARIA, attention_bias=True), draw_sharp),
    Family("aria of text and images", lambda: AriaConfig(text_config=ARIA, vision_config=EYES), draw_sharp,
           "AriaForConditionalGeneration", slow=True),
    Family("youtu", lambda: YoutuConfig(**LATENT, q_lora_rank=28, attention_bias=True, rope_parameters=YARN)),
    Family("youtu straight", lambda: YoutuConfig(**LATENT, q_lora_rank=None, rope_interleave=False), slow=True),
    Family("minicpm3", lambda: MiniCPM3Config(**LATENT, **MINICPM)),
    *([Family("minicpm3 longrope", lambda: MiniCPM3Config(**LATENT, **MINICPM, mlp_bias=True, rope_parameters=LONG),
              slow=True)] if KNOWS_LONGROPE else []),
    Family("ernie4_5_moe", lambda: Ernie4_5_MoeConfig(**TINY, **ERNIE), draw_sharp),
    Family("exaone_moe", lambda: ExaoneMoeConfig(**{**TINY, "num_hidden_layers": 4, "pad_token_id": 0}, head_dim=16,
                                                 sliding_window=9, num_experts=12, num_experts_per_tok=3, n_group=4,
                                                 topk_group=2, moe_intermediate_size=24), draw_sharp),
    Family("granitemoe", lambda: GraniteMoeConfig(**TINY, **GRANITE, attention_bias=True), draw_sharp, slow=True),
    Family("granitemoeshared", lambda: GraniteMoeSharedConfig(**TINY, **GRANITE, shared_intermediate_size=40),
           draw_sharp, slow=True),
    Family("granitemoeshared alone", lambda: GraniteMoeSharedConfig(**TINY, **GRANITE), draw_sharp, slow=True),
    Family("granitemoe_swa", lambda: GraniteMoeSWAConfig(**GRANITE_SWA), draw_sharp),
    Family("granitemoe_swa shared", lambda: GraniteMoeSWAConfig(**GRANITE_SWA, shared_intermediate_size=40),
           draw_sharp, slow=True),
    Family("flex_olmo", lambda: FlexOlmoConfig(**TINY, num_experts=8, num_experts_per_tok=3), draw_sharp),
    Family("hy_v3", lambda: HYV3Config(**TINY, **QWEN, head_dim=32, num_shared_experts=2), draw_sharp),
    Family("mellum", lambda: MellumConfig(**MELLUM, rope_parameters=SPEEDS), draw_sharp),
    Family("solar_open", lambda: SolarOpenConfig(**SOLAR, head_dim=16, attention_bias=True), draw_sharp),
]  # fmt: skip
