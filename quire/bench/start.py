"""`quire bench start`: the time from the start of a process to its first token, with a cold and a warm kernel cache.
With `run_pairs`, also `quire run` to its first token, alternating with a Python process that only imports torch.

Each run is a fresh Python process (`first_token`). All share a new kernel cache folder, which is empty for
the first run and warm for the others. Both processes read the system-wide monotonic clock, so imports count too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import quire
from quire.bench.offline import load_average
from quire.bench.stats import Bar, Report
from quire.config import Config, knobs
from quire.config_build import engine_settings
from quire.types import QuireError

PHASES = ("tried_s", "ready_s", "first_token_s", "tenth_token_s")
KERNEL_CACHES = {"TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "cuda", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


def bench_start(
    config: Config,
    *,
    prompt_len: int = 16,
    warm_runs: int = 2,
    run_pairs: int = 0,
    max_cold_s: float | None = None,
    max_warm_s: float | None = None,
    max_beyond_s: float | None = None,
) -> Report:
    busy = load_average()
    with tempfile.TemporaryDirectory(prefix="quire-start-") as folder:
        caches = {name: str(Path(folder, kind)) for name, kind in KERNEL_CACHES.items()}
        cold, *warm = (_run(config, prompt_len, caches) for _ in range(1 + warm_runs))
        run = _compare_run(config, run_pairs, caches) if run_pairs else None
    middle = {phase: median(run[phase] for run in warm) for phase in PHASES}
    bars = [
        Bar(f"first token, kernel cache {name}, seconds", run["first_token_s"], limit, "at most")
        for name, run, limit in (("cold", cold, max_cold_s), ("warm", middle, max_warm_s))
        if limit is not None
    ]
    if run is not None and max_beyond_s is not None:
        what = "first token of `quire run` beyond `import torch`, seconds"
        bars.append(Bar(what, run["beyond_import_s"], max_beyond_s, "at most"))
    return {
        "benchmark": "start",
        "model": config.model.model,
        "prompt_len": prompt_len,
        "load_before": busy,
        "cold": cold,
        "warm": middle,
        "warm_runs": warm,
        **({} if run is None else {"run": run}),
        "bars": [bar.to_report() for bar in bars],
        "pass": all(bar.passed for bar in bars),
    }


def _compare_run(config: Config, pairs: int, caches: dict[str, str]) -> Report:
    """Time `quire run` and `import torch` until their first byte of output, in pairs."""
    variables = {knobs()[name].variable: str(value) for name, value in engine_settings(config).items()}
    env = os.environ | caches | variables | {"PYTHONPATH": _path()}
    importing = [sys.executable, "-c", "import torch; print('imported')"]
    answering = [sys.executable, "-m", "quire", "run", "--max-tokens", "1", "Hello"]
    _first_word(answering, env)  # untimed run that fills the page cache for both
    times = [(_first_word(importing, env), _first_word(answering, env)) for _ in range(pairs)]
    importing_s, answering_s = (median(pair[which] for pair in times) for which in (0, 1))
    return {
        "pairs": times,
        "import_torch_s": importing_s,
        "first_token_s": answering_s,
        "beyond_import_s": answering_s - importing_s,
    }


def _first_word(command: list[str], env: dict[str, str]) -> float:
    start = time.monotonic()
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        word = process.stdout.read(1)
        took = time.monotonic() - start
        _, errors = process.communicate()
    if process.returncode or not word:
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["it ended without output"]
        raise QuireError("start_failed", f"`{' '.join(command[1:4])} …` failed: {last[0]}")
    return took


def _path() -> str:
    root = str(Path(quire.__file__).parents[1])  # a checkout may be neither installed nor the working directory
    return os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)


def _run(config: Config, prompt_len: int, caches: dict[str, str]) -> Report:
    """Run one process to its tenth token; returns the phases in seconds since its start."""
    task = {"settings": engine_settings(config), "prompt_len": prompt_len, "started": time.monotonic()}
    done = subprocess.run(
        [sys.executable, "-m", "quire.bench.first_token"],
        input=json.dumps(task),
        env=os.environ | caches | {"PYTHONPATH": _path()},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise QuireError(
            "start_failed",
            f"The process ended with code {done.returncode} before its first token.",
            "Its output is above.",
        ) from None
    if "code" in result:
        raise QuireError(result["code"], result["what"], result["hint"])
    return result
