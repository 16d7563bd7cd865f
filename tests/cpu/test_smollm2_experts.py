"""A mixture of experts with real weights: the built-in model with each feed-forward block copied into three experts.

Whatever the router says, weights that add up to one give back the block's own output, so the dense model is an exact
oracle for routing, sorting, products and sums.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire import LLM, QuireError, SamplingParams
from quire.files.gguf import open_gguf
from quire.files.source import resolve_model
from quire.models.gguf.checkpoint import read_config
from quire.models.loading.sources import GGUFCheckpoint
from tests.cpu.test_smollm2 import QUESTIONS

NUM_EXPERTS = 3
MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def write_mixture(path: Path, folder: Path) -> None:
    """A Mixtral checkpoint with the weights of a dense GGUF file, and routers drawn at random."""
    file = open_gguf(path)
    config = read_config(file)
    checkpoint = GGUFCheckpoint(file, config["head_dim"])
    tensors: dict[str, Tensor] = {}
    for name, shape in checkpoint.shapes.items():
        tensor = torch.empty(shape)
        checkpoint.read(name, tensor)
        layer, _, matrix = name.partition(".mlp.")
        if matrix:
            new = MATRICES[matrix.removesuffix(".weight")]
            for expert in range(NUM_EXPERTS):  # safetensors wants each to have memory of its own
                tensors[f"{layer}.block_sparse_moe.experts.{expert}.{new}.weight"] = tensor.clone()
        else:
            tensors[name] = tensor
    generator = torch.Generator().manual_seed(1)
    for layer in range(config["num_hidden_layers"]):
        router = torch.randn(NUM_EXPERTS, config["hidden_size"], generator=generator) * 0.1
        tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"] = router
    save_file(tensors, folder / "model.safetensors")
    mixture = {"model_type": "mixtral", "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2}
    (folder / "config.json").write_text(json.dumps({**config, **mixture, "layer_types": None}))


@pytest.mark.slow
def test_a_mixture_of_copies_says_what_the_dense_model_says(tmp_path: Path) -> None:
    try:
        path = resolve_model("smollm2").path
    except QuireError as error:
        pytest.skip(f"the built-in model can't be had here: {error}")
    write_mixture(path, tmp_path)
    dense = LLM("smollm2", dtype="float32", max_model_len=512)
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, logprobs=0)
    expected = dense.chat([[{"role": "user", "content": question}] for question in QUESTIONS], params)
    mixture = LLM(str(tmp_path), dtype="float32", max_model_len=512)
    got = mixture.generate([output.prompt_token_ids for output in expected], params)
    for question, one, other in zip(QUESTIONS, expected, got, strict=True):
        assert one.token_ids == other.token_ids, question
        pairs = zip(one.logprobs or (), other.logprobs or (), strict=True)
        assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 1e-3
