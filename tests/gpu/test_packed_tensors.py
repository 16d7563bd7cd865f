"""A checkpoint in FP8 is decoded on the card as on the host, bit for bit, and can be kept in FP8 there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.kernels.expert_types import ExpertWeights, quantize_matrix
from quire.kernels.table import select_ops
from quire.layers.experts import Experts
from quire.layers.weights import iter_weights
from tests.cpu.families.harness import save_checkpoint
from tests.cpu.rig import load
from tests.cpu.test_packed_tensors import family, logits_of, pack_folder
from tests.gpu.expert_checks import check_weights
from tests.gpu.script import DEVICE, ON_GPU, marks
from tests.gpu.where import Where

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
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    where = Where(DEVICE.type, True, (torch.bfloat16,), seed)
    save_checkpoint(family(name), tmp_path)
    models: list[Any] = [load(tmp_path, 16, DEVICE, dtype="bfloat16", quant=quant) for quant in ("none", "fp8")]
    plain, kept = (experts_of(model) for model in models)
    assert plain and len(plain) == len(kept)
    for of_plain, of_kept in zip(plain, kept, strict=True):
        check_kept(of_plain, of_kept)
        for num_tokens in (1, 5, 40):
            # One token's activations stay as they are.
            run_experts = select_ops(DEVICE.type).run_experts
            check_weights(where, torch.bfloat16, of_kept, num_tokens, 2, run_experts, rounds=num_tokens > 1)


def experts_of(model: Any) -> list[Any]:
    return [each.weights() for each in model.modules() if isinstance(each, Experts)]


def check_kept(plain: ExpertWeights, kept: ExpertWeights) -> None:
    """Bit for bit what rounding makes of each expert's matrices; nothing else is another."""
    assert kept.activation == plain.activation
    for name in ("gate_up", "down"):
        of_plain, of_kept, scales = getattr(plain, name), getattr(kept, name), getattr(kept, f"{name}_scale")
        assert of_kept.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
        made = [quantize_matrix(matrix) for matrix in of_plain]
        assert torch.equal(of_kept.view(torch.uint8), torch.stack([matrix for matrix, _ in made]).view(torch.uint8))
        assert torch.equal(scales, torch.stack([of_rows for _, of_rows in made]))
        bias, of_kept_bias = getattr(plain, f"{name}_bias"), getattr(kept, f"{name}_bias")
        assert (bias is None and of_kept_bias is None) or torch.equal(bias, of_kept_bias)
