"""A checkpoint in FP8 is decoded on the card as on the host, bit for bit, and can be kept in FP8 there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.kernels.experts import ExpertWeights
from quire.kernels.table import REFERENCE, select_ops
from quire.layers.experts import Experts
from quire.layers.weights import iter_weights
from tests.cpu.families.harness import save_checkpoint
from tests.cpu.rig import load
from tests.cpu.test_packed_tensors import family, logits_of, pack_folder
from tests.gpu.script import DEVICE, ON_GPU, marks

pytestmark = [marks(), pytest.mark.filterwarnings("ignore:.*in FP8")]


@pytest.mark.parametrize(("name", "block"), [("qwen3_moe", (24, 40)), ("deepseek_v3", (7, 9)), ("llama", None)])
def test_weights_are_those_of_a_cpu(name: str, block: tuple[int, int] | None, tmp_path: Path) -> None:
    save_checkpoint(family(name), tmp_path)
    pack_folder(tmp_path, block)
    here, there = load(tmp_path, kernels="torch"), load(tmp_path, 16, DEVICE, kernels="torch")
    assert not list(iter_weights(here)), "all of them are real"
    names = {name for name, _ in here.named_parameters()}
    assert len(names) > 10 and names == {name for name, _ in there.named_parameters()}
    for name, weight in here.named_parameters():
        assert torch.equal(weight, there.get_parameter(name).cpu()), name


@pytest.mark.skipif(not ON_GPU, reason="FP8 kernels are for CUDA")
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_it_can_be_kept_in_fp8(name: str, tmp_path: Path) -> None:
    """With a scale for each row instead of each block: another rounding of numbers that were rounded before."""
    save_checkpoint(family(name), tmp_path)
    pack_folder(tmp_path, (16, 32))
    with DEVICE:
        plain = logits_of(load(tmp_path, 16, DEVICE, dtype="bfloat16")).float()
        kept = logits_of(load(tmp_path, 16, DEVICE, dtype="bfloat16", quant="fp8")).float()
    assert 0 < (kept - plain).norm() < 0.2 * plain.norm()


@pytest.mark.skipif(not ON_GPU, reason="FP8 kernels are for CUDA")
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "qwen3_next", "gemma4 experts", "nemotron_h experts"])
def test_experts_can_be_kept_in_fp8(name: str, tmp_path: Path) -> None:
    """By themselves. Routers of tiny models decide by little: all linear layers in FP8 move logits by up to 0.4."""
    save_checkpoint(family(name), tmp_path)
    models: list[Any] = [load(tmp_path, 16, DEVICE, dtype="bfloat16", quant=quant) for quant in ("none", "fp8")]
    plain, kept = ([each.weights() for each in model.modules() if isinstance(each, Experts)] for model in models)
    assert plain and len(plain) == len(kept)
    for of_plain, of_kept in zip(plain, kept, strict=True):
        assert of_kept.gate_up.dtype == of_kept.down.dtype == torch.float8_e4m3fn
        num, width, _ = of_plain.down.shape
        for num_tokens in (1, 5, 40):
            x = torch.randn(num_tokens, width, device=DEVICE, dtype=torch.bfloat16)
            chosen = torch.rand(num_tokens, num, device=DEVICE).topk(2).indices.int()
            shares = torch.rand(num_tokens, 2, device=DEVICE)
            want = REFERENCE.run_experts(x.float(), widened(of_plain), chosen, shares)
            got = select_ops("cuda").run_experts(x, of_kept, chosen, shares).float()
            assert (got - want).norm() < 0.1 * want.norm()


def widened(experts: ExpertWeights) -> ExpertWeights:
    biases = (None if bias is None else bias.float() for bias in (experts.gate_up_bias, experts.down_bias))
    return ExpertWeights(experts.gate_up.float(), experts.down.float(), *biases, activation=experts.activation)
