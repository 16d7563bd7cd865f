"""`quire bench batch`: throughput of a batch against one stream, alternating in the same run.

Requests are greedy and have fresh prompts. Tokens per second count from submission to the last token, so both sides
include prefill.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from quire.bench.driver import measure, run_jobs
from quire.bench.offline import load_average, settings, warmup_jobs
from quire.bench.progress import Advance, progress_bar
from quire.bench.stats import Bar, Report
from quire.bench.workloads import BenchJob, Shape, draw_shape, fold_into, make_job

if TYPE_CHECKING:
    from quire.llm import LLM

MIN_RATIO = 4.0  # batch of 16 over one stream; built-in model, two cores, default settings
MIN_TPS = 100.0


def bench_batch(
    open_llm: Callable[[], LLM],
    *,
    batch: int = 16,
    prompt_len: int = 16,
    output_len: int = 64,
    rounds: int = 3,
    seed: int = 0,
) -> Report:
    sides = {"one": 1, "batch": batch}
    rates: dict[str, list[float]] = {side: [] for side in sides}
    busy = load_average()
    with open_llm() as llm, progress_bar(f"one and {batch} (output tokens)", rounds * (1 + batch) * output_len) as bar:
        run_jobs(llm, warmup_jobs(_jobs(llm, batch, prompt_len, output_len, seed)), salt=b"bench/warm-up")
        done = 0
        for index in range(rounds):
            order = list(sides) if index % 2 == 0 else list(reversed(sides))
            for side in order:
                jobs = _jobs(llm, sides[side], prompt_len, output_len, seed + index)
                run = run_jobs(
                    llm,
                    jobs,
                    salt=f"bench/{side}/{index}".encode(),
                    advance=_after(done, bar),
                )
                rates[side].append(measure(run)["output_tps"])
                done += sides[side] * output_len
        report = {
            "benchmark": "batch",
            "model": llm.config.model.model,
            "settings": settings(llm),
            "load_before": busy,
        }
    one, many = median(rates["one"]), median(rates["batch"])
    bars = [
        Bar("batch over one stream", many / one, MIN_RATIO, "at least"),
        Bar("batch output tok/s", many, MIN_TPS, "at least"),
    ]
    return {
        **report,
        "batch": batch,
        "prompt_len": prompt_len,
        "output_len": output_len,
        "rounds": [dict(zip(rates, pair, strict=True)) for pair in zip(*rates.values(), strict=True)],
        "one_tps": one,
        "batch_tps": many,
        "ratio": many / one,
        "bars": [bar.to_report() for bar in bars],
        "pass": all(bar.passed for bar in bars),
    }


def _after(done: int, bar: Advance) -> Advance:
    return lambda tokens: bar(done + tokens)


def _jobs(llm: LLM, count: int, prompt_len: int, output_len: int, seed: int) -> list[BenchJob]:
    shape = Shape(count, (prompt_len, prompt_len), (output_len, output_len))
    prompts, output_lens = draw_shape(shape, seed)
    pairs = zip(prompts, output_lens, strict=True)
    jobs = [make_job(p, n, f"request {i + 1} of {count}", 0.0, seed) for i, (p, n) in enumerate(pairs)]
    return fold_into(jobs, llm.edge.vocab_size)
