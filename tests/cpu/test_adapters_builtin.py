"""Adapters beside the built-in four-bit weights in the native kernels, against torch on the decoded weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire import LLM, SamplingParams
from quire.config import Config
from tests.cpu.native_isas import open_or_skip

SIZES = {
    "self_attn.q_proj": (576, 576),
    "self_attn.k_proj": (192, 576),
    "self_attn.v_proj": (192, 576),
    "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (1536, 576),
    "mlp.up_proj": (1536, 576),
    "mlp.down_proj": (576, 1536),
}
PROMPT = "The library opens at nine in the morning and closes at six. Readers may borrow four books for three weeks."


def write_adapter(folder: Path, rank: int, seed: int) -> Path:
    """An adapter of all seven linear layers with random matrices, as PEFT would write it."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(30):
        for name, (rows, columns) in SIZES.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * columns**-0.5
            tensors[f"{key}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.05
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "base_model_name_or_path": "smollm2"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_native_kernels_and_torch_say_the_same(tmp_path: Path) -> None:
    open_or_skip("portable")
    adapters = {f"a{rank}": write_adapter(tmp_path / f"a{rank}", rank, rank) for rank in (4, 16)}
    names = [None, "a4", "a16"]
    each = [SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=0, adapter=name) for name in names]
    scores: dict[str, list[torch.Tensor]] = {}
    for kernels in ("torch", "auto"):
        with LLM(config=Config(), adapters=adapters, max_model_len=256, num_pages=64, kernels=kernels) as llm:
            outputs = llm.generate([PROMPT] * 3, each)
            found = [[one.logprob for one in output.prompt_logprobs or () if one is not None] for output in outputs]
            scores[kernels] = [torch.tensor(one) for one in found]
    for torch_scores, native in zip(scores["torch"], scores["auto"], strict=True):
        assert (torch_scores - native).abs().max() < 0.1, "activations are rounded to 16 bits beside packed weights"
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert (scores["auto"][one] - scores["auto"][other]).abs().max() > 1
