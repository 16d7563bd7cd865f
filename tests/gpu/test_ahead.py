"""A start that finds nothing compiled has it compiled beside it, and answers as one that finds everything and tries
nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.machine import read_machine
from quire.startup.compile_ahead import count_workers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

DENSE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 4096,
    "num_attention_heads": 16, "num_hidden_layers": 2, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 32000,
}  # fmt: skip
MIXTURE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 4,
    "moe_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


@pytest.mark.skipif(count_workers(read_machine()) < 4, reason="needs some cores")
@pytest.mark.parametrize("config", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_what_a_cold_start_needs_is_compiled_beside_it(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "triton")}
    env.pop("TRITON_INTERPRET", None)
    cold, warm = (start(tmp_path, env) for _ in range(2))
    assert cold["beside"] and not warm["beside"], "once"
    assert len(cold["compiled"]) <= 2, f"the start itself has compiled {cold['compiled']}"
    assert len(cold["found"]) > 15
    assert len(cold["for chores"]) <= 4, f"for steps of other sizes it has compiled {cold['for chores']}"
    assert not warm["compiled"] and not warm["for chores"]
    assert cold["tried"] > 6 and warm["tried"] == 0, "what was tried is noted"
    assert cold["tokens"] == warm["tokens"]
    assert len(cold["tokens"]) == 10


def start(folder: Path, env: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", "tests.gpu.cold_start", str(folder)], env=env, text=True,
                          stdout=subprocess.PIPE, check=True)  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])
