"""Hunyuan, dense and with experts: heads are normed behind rope."""

from __future__ import annotations

from typing import Any

from transformers import HunYuanDenseV1Config, HunYuanMoEV1Config

from tests.cpu.families.experts import YARN, draw_sharp
from tests.cpu.families.harness import TINY, Family

HEADS: dict[str, Any] = {**TINY, "head_dim": 32, "pad_token_id": 0}
SLOWER = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}

FAMILIES = [
    Family("hunyuan_v1_dense", lambda: HunYuanDenseV1Config(**HEADS, rope_parameters=SLOWER)),
    Family(
        "hunyuan_v1_dense stretched",
        lambda: HunYuanDenseV1Config(**HEADS, rope_parameters=YARN, attention_bias=True),
        slow=True,
    ),
    Family(
        "hunyuan_v1_moe",
        lambda: HunYuanMoEV1Config(**HEADS, num_experts=6, moe_topk=[2, 2], rope_parameters=SLOWER),
        draw_sharp,
    ),
]
