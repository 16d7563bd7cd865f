"""`quire bench offline`: submit all requests of a workload at once; throughput, latency, and tokens per step.

Each run draws fresh prompts and has its own salt, so that no run hits prefixes that an earlier run cached. Hits within
a run count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire.bench.driver import check_jobs, measure, run_jobs
from quire.bench.memory import peak_memory
from quire.bench.progress import progress_bar
from quire.bench.stats import Bar, Report, median_of
from quire.bench.workloads import BenchJob, fold_into
from quire.machine import read_machine

if TYPE_CHECKING:
    from quire.llm import LLM

WARMUP_REQUESTS = 8
WARMUP_PROMPT = 64
WARMUP_OUTPUT = 4


@dataclass(frozen=True, slots=True)
class Workload:
    """A named workload or a file; `draw` returns its jobs for a seed."""

    name: str
    draw: Callable[[int], list[BenchJob]]
    may_fold: bool  # token ids are random, so they may be taken modulo a smaller vocabulary


def bench_offline(
    open_llm: Callable[[], AbstractContextManager[LLM]],
    work: Workload,
    *,
    seed: int = 0,
    repeat: int = 1,
    warmup: bool = True,
    min_output_tps: float | None = None,
) -> Report:
    """Open a model, warm it up, time `repeat` runs with consecutive seeds, and report each and the median."""
    busy = load_average()
    launched = time.perf_counter()
    with open_llm() as llm:
        ready = time.perf_counter()
        vocab_size = llm.edge.vocab_size
        num_folded = 0
        first_token_at: float | None = None
        runs: list[Report] = []
        for index in range(repeat):
            jobs = work.draw(seed + index)
            if work.may_fold and max(map(max, (job.tokens for job in jobs))) >= vocab_size:
                jobs, num_folded = fold_into(jobs, vocab_size), num_folded + 1
            check_jobs(llm, jobs)
            if warmup and not index:
                first_token_at = run_jobs(llm, warmup_jobs(jobs), salt=b"bench/warm-up").first_token_at
                llm.prepare()
            title = work.name if repeat == 1 else f"{work.name} {index + 1}/{repeat}"
            with progress_bar(f"{title} (output tokens)", sum(job.num_outputs for job in jobs)) as advance:
                run = run_jobs(llm, jobs, salt=b"bench/%d" % index, advance=advance)
            first_token_at = first_token_at or run.first_token_at
            runs.append({"seed": seed + index, **measure(run)})
        report = {
            "benchmark": "offline",
            "model": llm.config.model.model,
            "work": work.name,
            "folded_to_vocab": vocab_size if num_folded else None,
            "settings": settings(llm),
            "load_before": busy,
            "start": {"ready_s": ready - launched, "first_token_s": (first_token_at or ready) - launched},
            "warmup": warmup,
            "runs": runs,
            "median": median_of([{k: v for k, v in run.items() if k != "seed"} for run in runs]),
            "memory": peak_memory(),
        }
    bars = (
        []
        if min_output_tps is None
        else [Bar("output tok/s", report["median"]["output_tps"], min_output_tps, "at least")]
    )
    return {**report, "bars": [bar.to_report() for bar in bars], "pass": all(bar.passed for bar in bars)}


def warmup_jobs(jobs: Sequence[BenchJob]) -> list[BenchJob]:
    """Return the first few jobs with short prompts and answers, which touch memory and start threads and kernels."""
    return [
        replace(
            job,
            tokens=job.tokens[:WARMUP_PROMPT],
            params=replace(job.params, max_tokens=min(job.num_outputs, WARMUP_OUTPUT)),
        )
        for job in jobs[:WARMUP_REQUESTS]
    ]


def settings(llm: LLM) -> Report:
    """Return the effective settings that the figures depend on."""
    from quire.startup.defaults import pick_device  # torch is imported already

    limits = llm.engine.scheduler.limits
    return {
        "device": pick_device(llm.config.engine.device).type,
        "dtype": llm.config.model.dtype,
        "max_rows": limits.max_rows,
        "max_batch_tokens": limits.max_batch_tokens,
        "chunk_tokens": limits.chunk_tokens,
        "depth": limits.depth,
        "max_model_len": llm.max_model_len,
        "page_tokens": llm.engine.scheduler.cache.page_tokens,
        "cache_units": [pool.num_units - 1 for pool in llm.engine.scheduler.cache.pools],
        "prefix_cache": llm.config.cache.prefix_cache,
        "num_cores": read_machine().num_usable_cores,
    }


def load_average() -> float | None:
    """Return the machine's load average, or None if unknown. Figures of a busy machine are not reliable."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
