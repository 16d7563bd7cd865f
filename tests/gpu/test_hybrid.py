"""Recurrent hybrids with the heads that published ones have, on a Hopper card: the walk made for it. That hybrids are
right whatever the schedule: `test_families`."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.config import Config
from quire.config_build import override_config
from quire.files.source import resolve_model
from quire.models.loading import kernel_trials as trials
from quire.models.loading import loader
from quire.models.loading.loader import load_model
from quire.startup.assemble import build_model_engine
from quire.types import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

STEPS = [[(0, 100), (2, 57)], [(0, 1), (1, 1), (2, 1)], [(0, 130), (2, 1)], [(0, 8), (1, 7)], [(1, 1)], [(2, 1)]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


def save_wide_heads(kind: str, folder: Path) -> None:
    """A small Qwen3.5, Kimi Linear or Nemotron-H whose recurrent layers have the heads that published ones have."""
    from transformers import KimiLinearConfig, NemotronHConfig, Qwen3_5TextConfig

    from tests.cpu.families.harness import TINY, Family, save_checkpoint
    from tests.cpu.families.kimi_linear import SIZES
    from tests.cpu.families.mamba_hybrid import draw as draw_mamba
    from tests.cpu.families.qwen_hybrid import RECURRENT, draw

    if kind == "delta net":
        heads = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
        family = Family("qwen3_5_text", lambda: Qwen3_5TextConfig(**{**TINY, **RECURRENT, **heads}), draw)
    elif kind == "Kimi delta net":
        kinds = ["linear_attention", "full_attention", "linear_attention"]
        wide = {"num_hidden_layers": 3, "linear_num_heads": 8, "linear_head_dim": 128, "layer_types": kinds}
        family = Family("kimi_linear", lambda: KimiLinearConfig(**{**SIZES, **wide}), draw_mamba)
    else:
        fields = {name: value for name, value in TINY.items() if name != "num_hidden_layers"} | {"pad_token_id": 0}
        kinds = ["linear_attention", "mlp", "full_attention", "linear_attention"]
        family = Family("nemotron_h", lambda: NemotronHConfig(
            **fields, layers_block_type=kinds, head_dim=16, ssm_state_size=128, mamba_num_heads=16, mamba_head_dim=64,
            n_groups=2, chunk_size=16,
        ), draw=draw_mamba)  # fmt: skip
    save_checkpoint(family, folder)


def load_wide_heads(folder: Path, dtype: str = "bfloat16") -> loader.Model:
    files, device = resolve_model(str(folder)), torch.device("cuda", 0)
    return load_model(files, dtype=dtype, device=device, max_model_len=None, page_tokens=16, strict_kernels=True).model


def logits_of(model: loader.Model) -> Tensor:
    from tests.cpu.paged_harness import HarnessRow, PagedHarness

    rows = [HarnessRow([(7 * i * i + 3 + 5 * r) % 256 for i in range(n)]) for r, n in enumerate((250, 9, 60))]
    with torch.device("cuda"):
        harness = PagedHarness(model, num_pages=60, seed=2)
        return torch.cat([harness.step([(rows[row], count) for row, count in work]) for work in STEPS]).double()


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="needs Hopper")
@pytest.mark.parametrize(("kind", "op", "usual", "module", "settle"), [
    ("delta net", "gated_delta_net", "recurrent.recurrent", "recurrent.hopper.gated_delta", "settle_delta_net"),
    ("Kimi delta net", "channel_delta_net", "recurrent.channel_delta", "recurrent.hopper.channel_delta",
     "settle_channel_delta"),
    ("Mamba2", "mamba2", "recurrent.recurrent", "recurrent.hopper.mamba", "settle_mamba"),
])  # fmt: skip
def test_wide_heads_get_their_walk(
    kind: str, op: str, usual: str, module: str, settle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model computes with it what it computes without, in steps of any kind, and decodes are still captured."""
    from tests.cpu.families.harness import ragged_prompts
    from tests.cpu.rig import run

    save_wide_heads(kind, tmp_path)
    found = load_wide_heads(tmp_path)
    assert getattr(found.ops, op).__module__ == f"quire.kernels.triton.{module}"
    exact = logits_of(load_wide_heads(tmp_path, "float32"))
    scans, walk = [], importlib.import_module(f"quire.kernels.triton.{module}")
    scan = walk.scan
    monkeypatch.setattr(walk, "scan", lambda *args, **options: scans.append(scan(*args, **options)))
    got = (logits_of(found) - exact).norm() / exact.norm()
    assert scans, "the model's layers are not laid out as its kernels need it"
    knobs = {"page_tokens": 16, "num_pages": 600, "max_rows": 8, "max_batch_tokens": 96, "chunk_tokens": 70}
    engine, _ = build_model_engine(found, override_config(Config(), knobs), 256, torch.device("cuda", 0))
    first = run(engine, ragged_prompts(), GREEDY)
    assert all(len(tokens) == 32 for tokens in first)
    graphs = engine.workers.inner._graphs
    assert graphs is not None and graphs._graphs, "decode steps were captured"
    monkeypatch.setattr(trials, settle, lambda ops, *args, **options: ops)
    plain = load_wide_heads(tmp_path)
    assert getattr(plain.ops, op).__module__ == f"quire.kernels.triton.{usual}"
    want = (logits_of(plain) - exact).norm() / exact.norm()
    assert got <= 1.3 * want, f"off by {got:.1e} from float32, the kernels for all cards by {want:.1e}"
