"""`quire bench adapters`: the cost of LoRA adapters, against the base model in a process of the same kind.

Three sides answer the same prompts turn about: an engine without adapters, one that has them for requests without any,
and the same for requests that are spread over them. Then an adapter is loaded while requests decode, and the gaps
between their steps are compared with those before. Adapters have random matrices for every linear layer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from quire.bench.driver import measure, run_jobs
from quire.bench.offline import load_average, settings, warmup_jobs
from quire.bench.stats import Bar, Report, percentiles
from quire.bench.workloads import BenchJob, Shape, draw_shape, fold_into, make_job
from quire.files.adapters import read_adapter
from quire.types.control import ControlCommand

if TYPE_CHECKING:
    from quire.llm import LLM

MIN_RATE = 0.75  # of the base's output rate, with adapters
MIN_IDLE_RATE = 0.98  # of the base's output rate, without one beside loaded ones
MAX_GAP_RATIO = 1.2  # p99 gap between steps while an adapter is loaded, over that without
LOADS = 5


def bench_adapters(
    open_llm: Callable[[Mapping[str, Any]], Any],
    *,
    streams: int = 16,
    adapters: int = 8,
    rank: int = 16,
    prompt_len: int = 16,
    output_len: int = 64,
    rounds: int = 5,
    seed: int = 0,
) -> Report:
    """`open_llm` returns a context manager of an `LLM` with these settings changed."""
    busy = load_average()
    rates: dict[str, list[float]] = {"base": [], "none": [], "adapters": []}
    with ExitStack() as held:
        folder = Path(held.enter_context(TemporaryDirectory()))
        base = held.enter_context(open_llm({}))
        served = held.enter_context(open_llm({"adapter_slots": adapters + 1, "max_adapter_rank": max(rank, 8)}))
        names = [f"adapter-{index}" for index in range(adapters)]
        shapes = served.engine.adapters.shapes()
        for index, name in enumerate(names):
            served.load_adapter(name, write_random_adapter(folder / name, shapes, rank, seed + index))
        sides: dict[str, tuple[LLM, list[Any]]] = {
            "base": (base, [None]),
            "none": (served, [None]),
            "adapters": (served, names),
        }
        for llm, chosen in sides.values():
            run_jobs(llm, warmup_jobs(_jobs(llm, streams, prompt_len, output_len, seed, chosen)), salt=b"warm-up")
        for index in range(rounds):
            order = list(sides) if index % 2 == 0 else list(reversed(sides))
            for side in order:
                llm, chosen = sides[side]
                jobs = _jobs(llm, streams, prompt_len, output_len, seed + index, chosen)
                rates[side].append(measure(run_jobs(llm, jobs, salt=f"{side}/{index}".encode()))["output_tps"])
        extra = [write_random_adapter(folder / f"more-{i}", shapes, rank, seed + 100 + i) for i in range(LOADS)]
        quiet, loading = _gaps(served, streams, extra)
        report = {"benchmark": "adapters", "model": served.config.model.model, "settings": settings(served)}
    middle = {side: median(values) for side, values in rates.items()}
    bars = [
        Bar(
            f"{streams} streams over {adapters} adapters, of the base's tok/s",
            median(a / b for a, b in zip(rates["adapters"], rates["base"], strict=True)),
            MIN_RATE,
            "at least",
        ),
        Bar(
            "requests without an adapter, of the base's tok/s",
            median(a / b for a, b in zip(rates["none"], rates["base"], strict=True)),
            MIN_IDLE_RATE,
            "at least",
        ),
        Bar(
            "p99 gap while an adapter is loaded, over that without",
            loading["p99"] / quiet["p99"],
            MAX_GAP_RATIO,
            "at most",
        ),
    ]
    return {
        **report,
        "load_before": busy,
        "streams": streams,
        "adapters": adapters,
        "rank": rank,
        "rates": rates,
        "median_tps": middle,
        "gap_s": {"quiet": quiet, "loading": loading},
        "bars": [bar.to_report() for bar in bars],
        "pass": all(bar.passed for bar in bars),
    }


def write_random_adapter(folder: Path, shapes: Mapping[str, tuple[int, int]], rank: int, seed: int) -> Path:
    """Writes an adapter of these linear layers, (rows, columns) by name, as PEFT would."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (rows, columns) in shapes.items():
        key = f"base_model.model.{name}"
        tensors[f"{key}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * columns**-0.5
        tensors[f"{key}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.02
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


def _jobs(llm: LLM, count: int, prompt_len: int, output_len: int, seed: int, names: list[Any]) -> list[BenchJob]:
    prompts, lengths = draw_shape(Shape(count, (prompt_len, prompt_len), (output_len, output_len)), seed)
    pairs = enumerate(zip(prompts, lengths, strict=True))
    jobs = [make_job(tokens, length, f"request {i + 1}", 0.0, seed) for i, (tokens, length) in pairs]
    chosen = zip(fold_into(jobs, llm.edge.vocab_size), (names * count)[:count], strict=True)
    return [replace(job, params=replace(job.params, adapter=name)) for job, name in chosen]


def _gaps(llm: LLM, streams: int, extra: list[Path]) -> tuple[Report, Report]:
    """Returns the times between steps of decoding streams: alone, and while adapters are loaded one after the other."""
    engine = llm.engine
    steps = min(400, llm.max_model_len - 64)
    for index, job in enumerate(_jobs(llm, streams, 16, steps, 7, [None])):
        (request,) = llm.edge.requests(job.tokens, job.params, request_id=f"gap-{index}")
        engine.add(request)
    while engine.scheduler.stats.sampled_tokens == 0 or any(not r.num_sampled for r in engine.scheduler.running):
        engine.turn()
    quiet, loading = [], []
    for _ in range(100):
        started = time.perf_counter()
        engine.turn()
        quiet.append(time.perf_counter() - started)
    for number, path in enumerate(extra):
        digest = read_adapter(path).digest
        engine.controls.start(ControlCommand(number, "load_adapter", {"path": str(path), "digest": digest}))
        while engine.controls.is_open and engine.has_work:
            started = time.perf_counter()
            engine.controls.poll()
            engine.turn()
            loading.append(time.perf_counter() - started)
    for request_id in list(engine.scheduler.requests):
        engine.cancel(request_id)
    engine.run_until_idle()
    before, during = percentiles(quiet), percentiles(loading)
    assert before is not None and during is not None
    return before, during
