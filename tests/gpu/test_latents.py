"""A model of DeepSeek's kind with 40 heads, whole, on Hopper: it is given the kernel for many heads, and computes with
it what it computes without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.config import Config
from quire.config_build import override_config
from quire.files.source import resolve_model
from quire.models.loading import kernel_trials as trials
from quire.models.loading import loader
from quire.startup.assemble import build_model_engine
from quire.types import SamplingParams

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
STEPS = [[(0, 100), (2, 57)], [(0, 1), (1, 1), (2, 1)], [(0, 40), (2, 1)], [(0, 8), (1, 7)], [(1, 1)], [(2, 1)]]


def save_model(folder: Path) -> None:
    """Without experts: a choice of these that falls the other way would hide how near the rest is."""
    from transformers import DeepseekV3Config

    from tests.cpu.families.experts import GROUPS, LATENT, draw_sharp
    from tests.cpu.families.harness import Family, save_checkpoint

    heads = {"num_attention_heads": 40, "num_key_value_heads": 40}
    latents = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "q_lora_rank": 28}
    fields = {**LATENT, **GROUPS, **heads, **latents, "first_k_dense_replace": LATENT["num_hidden_layers"]}
    save_checkpoint(Family("deepseek_v3", lambda: DeepseekV3Config(**fields), draw_sharp), folder)


def load(folder: Path, dtype: str = "bfloat16") -> loader.Model:
    device = torch.device("cuda", 0)
    files = resolve_model(str(folder))
    return loader.load_model(
        files, dtype=dtype, device=device, max_model_len=None, page_tokens=16, strict_kernels=True
    ).model


def logits_of(model: loader.Model) -> Tensor:
    from tests.cpu.paged_harness import HarnessRow, PagedHarness

    rows = [HarnessRow([(7 * i * i + 3 + 5 * r) % 256 for i in range(n)]) for r, n in enumerate((150, 9, 60))]
    with torch.device("cuda"):
        harness = PagedHarness(model, num_pages=40, seed=2)
        return torch.cat([harness.step([(rows[row], count) for row, count in work]) for work in STEPS]).double()


def test_many_heads_get_their_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path)
    found = load(tmp_path)
    assert found.ops.latent_attention.__module__ == "quire.kernels.triton.latent.many_heads"
    exact = logits_of(load(tmp_path, "float32"))
    got = (logits_of(found) - exact).norm() / exact.norm()
    monkeypatch.setattr(trials, "settle_latent", lambda ops, *args, **options: ops)
    plain = load(tmp_path)
    assert plain.ops.latent_attention.__module__ == "quire.kernels.triton.latent.latent"
    want = (logits_of(plain) - exact).norm() / exact.norm()
    assert got <= 1.3 * want, f"off by {got:.1e} from float32, the kernel for all cards by {want:.1e}"


def test_captured_steps_go_on_with_it(tmp_path: Path) -> None:
    from tests.cpu.families.harness import ragged_prompts
    from tests.cpu.rig import run

    save_model(tmp_path)
    greedy = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    knobs = {"page_tokens": 16, "num_pages": 600, "max_rows": 8, "max_batch_tokens": 64, "chunk_tokens": 23}
    engine, _ = build_model_engine(load(tmp_path), override_config(Config(), knobs), 256, torch.device("cuda", 0))
    first = run(engine, ragged_prompts(), greedy)
    assert all(len(tokens) == 32 for tokens in first)
    graphs = engine.workers.inner._graphs
    assert graphs is not None and graphs._graphs, "decode steps were captured"
