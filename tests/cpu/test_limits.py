"""What a device's scheduler is given where nobody says otherwise, and that prompts do not hold decodes up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.config import Config
from quire.config_build import override_config
from quire.startup.defaults import resolve_limits, resolve_page_tokens
from quire.types import SamplingParams
from tests.cpu.rig import load, make_engine, make_request
from tests.cpu.tiny_models import make_tiny

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "asked", "target"),
    [("cpu", None, 0.25), ("cpu", 0, None), ("cpu", 80, 0.08), ("cuda", None, None), ("cuda", 50, 0.05)],
)
def test_steps_of_a_cpu_keep_to_a_quarter_of_a_second(device: str, asked: float | None, target: float | None) -> None:
    config = override_config(Config(), {} if asked is None else {"step_target_ms": asked})
    assert resolve_limits(config, torch.device(device)).step_target_seconds == target


@pytest.mark.parametrize(
    ("device", "asked", "tokens"), [("cpu", "auto", 16), ("cuda", "auto", 64), ("cpu", "64", 64), ("cuda", "16", 16)]
)
def test_pages_are_larger_on_a_gpu_unless_somebody_says_otherwise(device: str, asked: str, tokens: int) -> None:
    config = override_config(Config(), {"page_tokens": asked})
    assert resolve_page_tokens(config, torch.device(device)) == tokens
    assert resolve_page_tokens(Config(), torch.device(device)) == (64 if device == "cuda" else 16)


def test_decodes_move_in_every_step_of_a_long_prompt(tmp_path: Path) -> None:
    engine = make_engine(load(make_tiny("llama", tmp_path)[1]), max_len=1024, max_batch_tokens=64, step_target_ms=250)
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    for name in ("a", "b"):
        engine.add(make_request(name, [1, 2, 3], params))
    while engine.scheduler.stats.sampled_tokens < 10:
        engine.turn()
    engine.add(make_request("long", [place % 250 for place in range(600)], params))
    began = engine.scheduler.stats.steps
    tokens = {"a": 0, "b": 0, "long": 0}
    while not tokens["long"]:
        for delta in engine.turn():
            tokens[delta.request_id] += len(delta.token_ids)
    steps = engine.scheduler.stats.steps - began
    assert steps >= 600 // 64 and tokens["a"] == tokens["b"] == steps
