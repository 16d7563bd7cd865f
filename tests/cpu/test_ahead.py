"""A start on a Hopper card that is not there: its rehearsal goes through for every family, and what the processes
beside it compile is what it looks for on disk. What becomes of kernels and processes: `tests/pure/test_ahead`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.startup import compile_ahead as ahead
from quire.startup.compile_ahead import Compilers
from tests.cpu.families.harness import all_families
from tests.cpu.published_shapes import published_shapes
from tests.cpu.tiny_llm import make_tiny_llm

FEW = ("_gate_mul_kernel", "_finish_kernel")  # small ones
MODES: tuple[dict[str, Any], ...] = ({"deterministic": True}, {"quant": "fp8"}, {"kv_dtype": "fp8"})


def ask(task: str, entries: list[Any]) -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, "-m", "tests.cpu.fake_hopper", task], input=json.dumps(entries) + "\n",
                          stdout=subprocess.PIPE, text=True)  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(entries)
    return answers


def save_configs(folder: Path) -> dict[str, dict[str, Any]]:
    """Settings by the name of a family, and of a mode for some; without weights."""
    settings = {}
    for family in all_families():
        place = folder / family.name
        place.mkdir()
        (place / "config.json").write_text(family.config().to_json_string(use_diff=False))
        settings[family.name] = {"model": str(place), "random_weights": True}
    for name in ("qwen3", "qwen3_moe"):
        settings |= {f"{name} {mode}": settings[name] | mode for mode in MODES}
    return settings


def test_what_others_compile_is_what_a_start_looks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("FEW_KERNELS", ",".join(FEW))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    settings = save_configs(tmp_path)
    stamp = tmp_path / "triton/stamp"
    Compilers(settings["cohere"], 2, stamp, dry_run="tests.cpu.fake_hopper").wait()
    assert stamp.exists()

    starts = dict(zip(settings, ask("start", list(settings.values())), strict=True))
    for name, start in starts.items():
        assert not start["trouble"], f"{name}: no kernel is given up on the way, nothing is refused: {start['trouble']}"
        assert not start["imported"], f"{name}: seconds for nothing: {start['imported']}"
    assert {*FEW} <= {*starts["cohere"]["found"]}, "compiled beside another start, and found on disk"

    told = [kernel for start in starts.values() for kernel in start["told"]]  # each once: a process remembers
    assert len(told) > 200
    by_start = [[kernel["name"] for kernel in start["told"]] for start in starts.values()]
    assert max(names.count("_few_down_kernel") for names in by_start) == 2, "one token's experts, and a few tokens'"
    in_fp8 = starts["qwen3_moe {'quant': 'fp8'}"]["told"]
    experts = [kernel for kernel in in_fp8 if kernel["name"] in ("_grouped_kernel", "_few_down_kernel")]
    weights = [json.loads(kernel["data"])["signature"]["weight_ptr"] for kernel in experts]
    assert weights == ["*fp8e4nv"] * 5, "of a trial and of steps"
    (work,) = ask("work", [told])
    missed = {name for start in starts.values() for name in start["names"]} - {*work["names"]}
    assert not missed, f"{len(missed)} of {len(told)} would lie elsewhere"


def test_no_size_of_step_needs_a_kernel_that_idle_moments_have_not_met(tmp_path: Path) -> None:
    """Or a request would wait for the compiler, and everybody beside it. Steps of decodes alone are captured, in sizes
    that are all met."""
    seed = int(os.environ.get("TEST_SEED", "1"))
    print(f"{seed=}")
    rng = random.Random(seed)
    sizes = [(rng.choice((0, 0, 1, 3, rng.randrange(257))), 1 + int(2 ** rng.uniform(0, 14))) for _ in range(30)]
    settings = []
    for name, config in published_shapes().items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config.to_json_string(use_diff=False))
        settings.append({"model": str(tmp_path / name), "random_weights": True, "dtype": "bfloat16",
                         "max_model_len": 4224, "max_batch_tokens": 16384})  # fmt: skip
    for name, steps in zip(published_shapes(), ask("steps", [(each, sizes) for each in settings]), strict=True):
        assert steps["told"] > 0 and not steps["found"], f"{name}: {steps['found']}"


def test_a_start_beside_which_everything_fails_answers_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_llm(tmp_path / "model")
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    load = partial(LLM, str(folder), dtype="float32", max_model_len=200, num_pages=100)
    with load() as llm:
        expected = llm.generate("why", greedy)[0].token_ids
    started: list[Compilers] = []

    def start(*args: Any) -> Compilers:
        started.append(Compilers(*args, dry_run="tests.pure.no_such_module"))
        return started[0]

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ahead, "may_have_gpu", lambda: True)
    monkeypatch.setattr(ahead, "count_workers", lambda machine: 2)
    monkeypatch.setattr(ahead, "find_spec", lambda name: os)
    monkeypatch.setattr(ahead, "Compilers", start)
    with load() as llm:
        assert llm.generate("why", greedy)[0].token_ids == expected
    assert started, "it was tried"
    started[0].wait()
