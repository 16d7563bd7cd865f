"""The pool of threads and the cores: as many as the process may use, none of torch's beside them, asleep when idle.

Each test runs a process of its own, because threads and affinity are a process's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.machine import read_machine
from tests.cpu.native_isas import open_or_skip
from tests.cpu.test_bench_offline import CONFIG, KNOBS

ENGINE = """
import json, os, sys, time
cores = json.loads(sys.argv[2])
if cores:
    os.sched_setaffinity(0, cores)
import torch
from quire import LLM, SamplingParams
llm = LLM(sys.argv[1], **json.loads(sys.argv[3]))
params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
prompts = [[1 + i, 2, 3, 4] * 10 for i in range(4)]
tokens = [list(output.token_ids) for output in llm.generate(prompts, params)]
native = llm.engine.workers.inner._model.ops.native
start = time.process_time()
time.sleep(1.0)
print(json.dumps({"tokens": tokens, "native": native.num_threads, "torch": torch.get_num_threads(),
                  "idle": time.process_time() - start}))
"""


def run_engine(folder: Path, cores: list[int], **more: Any) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    knobs = {**KNOBS, "threads": None, **more}
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "QUIRE_"))}
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, str(folder), json.dumps(cores), json.dumps(knobs)],
        env=env | {"PYTHONPATH": root}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(autouse=True)
def _needs_the_library() -> None:
    open_or_skip("portable")


def test_the_pool_has_the_cores_and_sleeps_when_idle(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    free, bound = run_engine(tmp_path, []), run_engine(tmp_path, mine[:1])
    assert bound["native"] == 1 and bound["torch"] == 1, "affinity is respected"
    assert free["native"] == read_machine().num_usable_cores, "and so is what the container allows"
    assert free["torch"] == 1, "torch has one thread beside the pool"
    for report in (free, bound):
        assert report["idle"] < 0.1, "of a second without work"
    assert free["tokens"] == bound["tokens"]


def test_a_given_number_of_threads_holds(tmp_path: Path) -> None:
    assert run_engine(tmp_path, [], threads=3)["native"] == 3
