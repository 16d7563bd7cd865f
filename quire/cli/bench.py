"""`quire bench offline|latency|start|gap|…`: measure the engine, or any server with an OpenAI-style API.

The benchmarks are in `quire.bench`, their flags in `bench_flags`. Exit codes: 0 every gate was met, 1 the benchmark
could not be run (wrong usage included), 2 a gate was missed.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.bench_commands.agent import add_agent, run_agent
from quire.cli.bench_commands.flags import FLAGS
from quire.cli.bench_commands.hostile import add_hostile, run_hostile
from quire.cli.bench_commands.online import add_compare, add_online, run_compare, run_online
from quire.cli.bench_commands.speculation import add_speculation, run_speculation
from quire.cli.output import print_error, print_note, write_json
from quire.cli.run import OpenLLM, open_llm
from quire.config_build import config_from_args, override_config
from quire.types import QuireError

if TYPE_CHECKING:
    from quire.bench.offline import Workload
    from quire.bench.stats import Report
    from quire.config import Config

PASSED, BROKEN, MISSED = 0, 1, 2


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        usage="quire bench BENCHMARK [options]",
        help="measure speed",
        description="Measure the engine.",
        epilog="Exit codes: 0 every gate was met, 1 wrong usage or no measurement, 2 a gate was missed.",
    )
    benchmarks = parser.add_subparsers(
        title="benchmarks", prog="quire bench", dest="benchmark", metavar="BENCHMARK", required=True
    )
    for add in FLAGS:
        add(benchmarks)
    add_online(benchmarks)
    add_compare(benchmarks)
    add_hostile(benchmarks)
    add_speculation(benchmarks)
    add_agent(benchmarks)
    for name, benchmark in benchmarks.choices.items():
        benchmark.usage = f"quire bench {name} [options]"  # keeps the list of all settings out of usage errors


def run(args: Namespace) -> int:
    return run_command(args, open_llm)


def run_command(args: Namespace, open_llm: OpenLLM) -> int:
    """Run the chosen benchmark, print its report, and return the exit code; wrong input returns 1, not 2."""
    try:
        report = _MEASURE[args.benchmark](args, open_llm)
    except QuireError as error:
        print_error(error.what, error.hint)
        return BROKEN
    if args.json:
        write_json(report)
    else:
        _show(report)
    must_pass = args.gate if args.benchmark == "batch" else True
    return MISSED if must_pass and not report["pass"] else PASSED


def _show(report: Report) -> None:
    if "works" in report:
        for one in report["works"]:
            _show(one)
        return
    if report["benchmark"] == "online-sweep":
        from quire.bench.online.sweep import show_sweep

        show_sweep(report)
        return
    if report["benchmark"] in ("online", "compare"):
        from quire.bench.online.tables import show_comparison, show_online

        (show_online if report["benchmark"] == "online" else show_comparison)(report)
        return
    if report["benchmark"] == "hostile":
        from quire.bench.hostile.tables import show_hostile

        show_hostile(report)
        return
    if report["benchmark"] == "speculation":
        from quire.bench.speculation.tables import show_speculation

        show_speculation(report)
        return
    if report["benchmark"] == "agent":
        from quire.bench.agent.tables import show_agent

        show_agent(report)
        return
    if report["benchmark"] == "kernels":
        from quire.bench.kernels.suite import KernelResult
        from quire.bench.kernels.suite import show as kernel_table

        print(kernel_table([KernelResult(**result) for result in report["results"]]))
        return
    from quire.bench.tables import show

    show(report)


# ---------------------------------------------------------------------------------------------------------------------
# The benchmarks


def _plain_config(args: Namespace) -> Config:
    """Return the settings of a benchmark: without speculation unless told, since its prompts are random tokens."""
    config = config_from_args(args)
    return config if "speculate" in config.sources else override_config(config, {"speculate": "off"})


def _offline(args: Namespace, open_llm: OpenLLM) -> Report:
    from quire.bench.offline import bench_offline

    config, works = _plain_config(args), _works(args)
    reports = []
    with ExitStack() as held:
        open_once = cache(lambda: nullcontext(held.enter_context(open_llm(config))))
        for work in works:
            report = bench_offline(
                open_once,
                work,
                seed=args.seed,
                repeat=args.repeat,
                warmup=not args.no_warmup,
                min_output_tps=args.min_output_tps,
            )
            if report["folded_to_vocab"] is not None:
                size = report["folded_to_vocab"]
                print_note(f"token ids of {work.name} (up to 10000) are taken modulo the model's vocabulary of {size}.")
            reports.append(report)
    if len(reports) == 1:
        return reports[0]
    return {"benchmark": "offline", "works": reports, "pass": all(report["pass"] for report in reports)}


def _works(args: Namespace) -> list[Workload]:
    """Return the workloads of `--workload` or `--requests`. Raises QuireError for bad input before a model loads."""
    from quire.bench.offline import Workload
    from quire.bench.workloads import draw_workload, make_job, read_jobs

    make_job([0], 1, "", args.temperature, args.seed)
    if args.workload is not None:
        draws = {name: partial(draw_workload, name, temperature=args.temperature) for name in args.workload}
        return [Workload(name, draw, may_fold=True) for name, draw in draws.items()]
    read = partial(read_jobs, args.requests, temperature=args.temperature)
    read(args.seed)
    return [Workload(args.requests.name, read, may_fold=False)]


def _batch(args: Namespace, open_llm: OpenLLM) -> Report:
    from quire.bench.batching import bench_batch

    config = _plain_config(args)
    return bench_batch(
        lambda: open_llm(config),
        batch=args.batch,
        prompt_len=args.prompt_len,
        output_len=args.output_len,
        rounds=args.rounds,
        seed=args.seed,
    )


def _latency(args: Namespace, open_llm: OpenLLM) -> Report:
    from quire.bench.latency import Load, bench_latency

    config = _plain_config(args)
    load = Load(
        args.decodes, args.decode_len, args.prompts, args.prompt_len, args.every, args.fresh_tail, args.alone, args.rest
    )
    return bench_latency(lambda: open_llm(config), load, targets_ms=args.targets, seed=args.seed)


def _start(args: Namespace, open_llm: OpenLLM) -> Report:
    from quire.bench.start import bench_start

    return bench_start(
        _plain_config(args),
        prompt_len=args.prompt_len,
        warm_runs=args.warm_runs,
        run_pairs=args.run_pairs,
        max_beyond_s=args.max_beyond,
        max_cold_s=args.max_cold,
        max_warm_s=args.max_warm,
    )


def _gap(args: Namespace, open_llm: OpenLLM) -> Report:
    from quire.bench.gap import bench_gap

    config = _plain_config(args)
    return bench_gap(
        lambda: open_llm(config),
        rows=args.rows,
        prompt_len=args.prompt_len,
        steps=args.steps,
        max_idle_share=args.max_idle,
    )


def _growth(args: Namespace, open_llm: OpenLLM) -> Report:
    from quire.bench.growth import bench_growth, fit_cache

    if args.first >= args.last:
        raise QuireError("usage", f"--first {args.first} is not before --last {args.last}.", "Swap them.")
    config = fit_cache(_plain_config(args), args.first)
    return bench_growth(lambda: open_llm(config), first=args.first, last=args.last, seed=args.seed)


def _scheduler(args: Namespace, open_llm: OpenLLM) -> Report:
    from quire.bench.scheduling import bench_scheduler

    return bench_scheduler()


def _kernels(args: Namespace, open_llm: OpenLLM) -> Report:
    import torch

    if not torch.cuda.is_available():
        raise QuireError("no_device", "No CUDA device is usable on this machine, so there are no GPU kernels to time.")
    from quire.bench.kernels.suite import run as run_kernels

    return {
        "benchmark": "kernels",
        "results": [result.as_dict() for result in run_kernels(only=args.only)],
        "pass": True,
    }


def _llama_cpp(args: Namespace, open_llm: OpenLLM) -> Report:
    from quire.bench.llama_cpp import bench_llama_cpp, bench_shapes
    from quire.files.source import resolve_model
    from quire.files.store import cache_dir
    from quire.machine import read_machine

    config = _plain_config(args)
    files = resolve_model(config.model.model, offline=config.model.offline)
    if files.kind != "gguf":
        raise QuireError("usage", f"{files.name} is not a GGUF file.", "Give a GGUF file, which both engines can read.")
    folder = cache_dir() / "bench"
    folder.mkdir(parents=True, exist_ok=True)

    def open_file(path: Path, **knobs: Any) -> Any:
        return open_llm(override_config(config, {**knobs, "model": str(path)}))

    threads = config.engine.threads or read_machine().num_usable_cores
    if args.shape:
        names, mixtures = args.shape.split(","), args.types.split(",")
        return bench_shapes(
            open_file, names, mixtures, files.path, folder, threads=threads, rounds=args.rounds, say=print_note
        )
    return bench_llama_cpp(open_file, files.path, folder, threads=threads, rounds=args.rounds, say=print_note)


def _quality(args: Namespace, open_llm: OpenLLM) -> Report:
    from quire.bench.quality import bench_quality

    try:
        text = args.text.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise QuireError("usage", f"{args.text} can't be read: {error}.", "Give a plain text file.") from None
    return bench_quality(_plain_config(args), text, stretches=args.stretches, length=args.length)


def _tiers(args: Namespace, open_llm: OpenLLM) -> Report:
    from quire.bench.tiers import TierWork, bench_tiers

    config = config_from_args(args)
    work = TierWork(tuple(args.lengths), args.rounds, args.stream_tokens, args.seed)
    return bench_tiers(lambda knobs: open_llm(override_config(config, knobs)), work)


def _adapters(args: Namespace, open_llm: OpenLLM) -> Report:
    from quire.bench.adapters import bench_adapters

    config = _plain_config(args)
    return bench_adapters(
        lambda knobs: open_llm(override_config(config, knobs)),
        streams=args.streams,
        adapters=args.adapters,
        rank=args.rank,
        output_len=args.output_len,
        rounds=args.rounds,
        seed=args.seed,
    )


_MEASURE: dict[str, Callable[[Namespace, OpenLLM], Report]] = {
    "offline": _offline,
    "batch": _batch,
    "latency": _latency,
    "start": _start,
    "gap": _gap,
    "growth": _growth,
    "scheduler": _scheduler,
    "kernels": _kernels,
    "online": run_online,
    "compare": run_compare,
    "compare-llama-cpp": _llama_cpp,
    "quality": _quality,
    "hostile": run_hostile,
    "speculation": run_speculation,
    "agent": run_agent,
    "tiers": _tiers,
    "adapters": _adapters,
}
