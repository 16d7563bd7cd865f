"""A checkpoint in FP8 is decoded on the card as on the host, bit for bit, and can be kept in FP8 there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.layers.moe import Experts
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
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3"])
def test_it_can_be_kept_in_fp8(name: str, tmp_path: Path) -> None:
    """With a scale for each row instead of each block: another rounding of numbers that were rounded before."""
    save_checkpoint(family(name), tmp_path)
    pack_folder(tmp_path, (16, 32))
    with DEVICE:
        plain = logits_of(load(tmp_path, 16, DEVICE, dtype="bfloat16")).float()
        kept = logits_of(load(tmp_path, 16, DEVICE, dtype="bfloat16", quant="fp8")).float()
    assert 0 < (kept - plain).norm() < 0.2 * plain.norm()


@pytest.mark.skipif(not ON_GPU, reason="FP8 kernels are for CUDA")
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "qwen3_next", "gemma4 experts", "nemotron_h experts"])
def test_experts_can_be_kept_in_fp8(name: str, tmp_path: Path) -> None:
    save_checkpoint(family(name), tmp_path)
    with DEVICE:
        plain = load(tmp_path, 16, DEVICE, dtype="bfloat16")
        kept = load(tmp_path, 16, DEVICE, dtype="bfloat16", quant="fp8")
        mixtures = [module for module in kept.modules() if isinstance(module, Experts)]
        assert mixtures and all(each.gate_up.dtype == each.down.dtype == torch.float8_e4m3fn for each in mixtures)
        off = logits_of(kept).float() - logits_of(plain).float()
        assert 0 < off.norm() < 0.2 * logits_of(plain).float().norm()
