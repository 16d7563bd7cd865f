"""Recurrent hybrids on a GPU, with captured decode steps, against the same weights on the CPU, both in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.assemble import build_engine
from quire.config import Config
from quire.config_build import override_config
from quire.files.source import resolve_model
from quire.models.loader import load_model
from quire.types import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

HYBRIDS = ("qwen3_next", "qwen3_5_text", "nemotron_h", "nemotron_h experts", "mamba2", "bamba", "granitemoehybrid")
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_on_a_gpu_equal_the_cpu(name: str, tmp_path: Path) -> None:
    from tests.cpu.families.harness import all_families, ragged_prompts, save_checkpoint
    from tests.cpu.rig import load, make_engine, run

    family = next(family for family in all_families() if family.name == name)
    save_checkpoint(family, tmp_path)
    prompts = ragged_prompts()
    expected = run(make_engine(load(tmp_path, page_tokens=16), page_tokens=16), prompts, GREEDY)
    device = torch.device("cuda", 0)
    files = resolve_model(str(tmp_path))
    model = load_model(files, dtype="float32", device=device, max_model_len=None, page_tokens=16).model
    for preemption, num_pages in (("swap", 600), ("swap", 24), ("recompute", 24)):
        knobs = {"page_tokens": 16, "num_pages": num_pages, "max_rows": 8, "max_batch_tokens": 64, "chunk_tokens": 23,
                 "depth": 2, "preemption": preemption}  # fmt: skip
        engine, _ = build_engine(model, override_config(Config(), knobs), 256, device)
        for warm in (False, True):
            assert run(engine, prompts, GREEDY) == expected, f"{preemption}, {num_pages} pages, warm={warm}"
    graphs = engine.workers._inner._graphs
    assert graphs is not None and graphs._graphs, "decode steps were captured"
