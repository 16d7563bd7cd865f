"""`quire bench offline|latency|start|gap|…`: measure the engine, or a server of any make.

The benchmarks themselves are in `quire.bench`.

Exit codes, so that a script can tell: 0 every bar was met, 1 it could not be measured, 2 a bar was missed.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.bench_online import add_compare, add_online, run_compare, run_online
from quire.cli.output import print_error, print_note, write_json
from quire.cli.run import OpenLLM, open_llm
from quire.config_build import ENGINE_TABLES, add_config_flags, config_from_args
from quire.types import QuireError

if TYPE_CHECKING:
    from quire.bench.offline import Work
    from quire.bench.stats import Report

PASSED, BROKEN, MISSED = 0, 1, 2


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        usage="quire bench BENCHMARK [options]",
        help="measure speed",
        description="Measure the engine.",
        epilog="Exit codes: 0 every bar was met, 1 it could not be measured, 2 a bar was missed.",
    )
    benchmarks = parser.add_subparsers(title="benchmarks", dest="benchmark", metavar="BENCHMARK", required=True)
    _add_offline(benchmarks)
    _add_batch(benchmarks)
    _add_latency(benchmarks)
    _add_start(benchmarks)
    _add_gap(benchmarks)
    _add_growth(benchmarks)
    scheduler = benchmarks.add_parser(
        "scheduler",
        help="what deciding costs, without a model",
        description="Time plan and commit against a device that answers at once, and how their cost grows.",
    )
    _add_json(scheduler)
    kernels = benchmarks.add_parser(
        "kernels",
        help="each GPU kernel against the card's own ceilings",
        description="Time every CUDA kernel, in TB/s or TFLOP/s, beside what the card reads and multiplies at best.",
    )
    kernels.add_argument("--only", default="", metavar="NAME", help="only kernels whose name contains this")
    _add_json(kernels)
    add_online(benchmarks)
    add_compare(benchmarks)
    _add_llama_cpp(benchmarks)
    _add_quality(benchmarks)


def run(args: Namespace) -> int:
    return run_command(args, open_llm)


def run_command(args: Namespace, open_llm: OpenLLM) -> int:
    """Input that is wrong is "could not be measured" here: 2 must mean a missed bar and nothing else."""
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
    if report["benchmark"] in ("online", "compare"):
        from quire.bench.online_tables import show_comparison, show_online

        (show_online if report["benchmark"] == "online" else show_comparison)(report)
        return
    if report["benchmark"] == "kernels":
        from quire.bench.kernels import KernelResult
        from quire.bench.kernels import show as kernel_table

        print(kernel_table([KernelResult(**result) for result in report["results"]]))
        return
    from quire.bench.tables import show

    show(report)


# ---------------------------------------------------------------------------------------------------------------------
# Flags


def _add_offline(benchmarks: Any) -> None:
    from quire.bench.workloads import TEMPERATURE, WORKLOADS

    parser = benchmarks.add_parser(
        "offline",
        usage="quire bench offline (--requests FILE | --workload NAME…) [options]",
        help="a batch of requests from start to end",
        description="Submit requests all at once and time them to the end. Answers run to their full length.",
    )
    work = parser.add_mutually_exclusive_group(required=True)
    work.add_argument(
        "--requests",
        type=Path,
        metavar="FILE",
        help='one {"prompt_token_ids": […], "max_tokens": n} a line, with temperature and seed if wanted',
    )
    work.add_argument("--workload", nargs="+", choices=tuple(WORKLOADS),
                      help="work made from the seed, the same for every engine; several share one start")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="what to draw from (default: 0)")
    parser.add_argument("--temperature", type=float, default=TEMPERATURE, metavar="X",
                        help=f"0 takes the likeliest token every time (default: {TEMPERATURE})")  # fmt: skip
    parser.add_argument("--repeat", type=_at_least(1), default=1, metavar="N",
                        help="runs, each with the next seed; the median is reported too (default: 1)")  # fmt: skip
    parser.add_argument("--no-warmup", action="store_true", help="skip the short untimed run before the first")
    parser.add_argument("--min-output-tps", type=float, metavar="X", help="exit 2 if the median is below this")
    _add_json(parser)
    add_config_flags(parser)


def _add_batch(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "batch",
        help="one stream against a batch",
        description="Tokens per second of one greedy request and of a batch, by turns in the same run.",
    )
    parser.add_argument("--batch", type=_at_least(1), default=16, metavar="N", help="requests (default: 16)")
    parser.add_argument("--prompt-len", type=_at_least(1), default=16, metavar="N", help="tokens (default: 16)")
    parser.add_argument("--output-len", type=_at_least(1), default=64, metavar="N", help="tokens (default: 64)")
    parser.add_argument("--rounds", type=_at_least(1), default=3, metavar="N", help="of both sides (default: 3)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="what to draw prompts from (default: 0)")
    parser.add_argument("--gate", action="store_true", help="exit 2 if a bar is missed")
    _add_json(parser)
    add_config_flags(parser)


def _add_latency(benchmarks: Any) -> None:
    from quire.bench.latency import Load

    parser = benchmarks.add_parser(
        "latency",
        help="decodes and long prompts that disturb each other",
        description="Gaps between tokens of running requests while long prompts arrive, and those prompts' time to the "
        "first token, without and with a step-time target; then a long prompt on an idle engine, cold and cached.",
    )
    load = Load()
    for name, what in (("decodes", "requests that run"), ("decode-len", "tokens they begin with"),
                       ("prompts", "prompts that arrive"), ("prompt-len", "their tokens"),
                       ("fresh-tail", "tokens of the warm prompt that are not cached")):  # fmt: skip
        default = getattr(load, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=_at_least(1), default=default, metavar="N",
                            help=f"{what} (default: {default})")  # fmt: skip
    parser.add_argument("--every", type=float, default=load.every, metavar="S",
                        help=f"seconds between arrivals (default: {load.every})")  # fmt: skip
    parser.add_argument("--alone", type=float, default=load.alone_s, metavar="S",
                        help=f"seconds the decodes are watched alone (default: {load.alone_s})")  # fmt: skip
    parser.add_argument("--targets", type=_targets, default=(None, 50.0, 30.0), metavar="LIST",
                        help="step-time targets in ms, or off, separated by commas (default: off,50,30)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="what to draw prompts from (default: 0)")
    _add_json(parser)
    add_config_flags(parser)


def _add_start(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "start",
        help="from starting a process to its first token",
        description="Start fresh processes and time them to the first token: one without compiled kernels on disk, "
        "then some that find them there.",
    )
    parser.add_argument("--prompt-len", type=_at_least(1), default=16, metavar="N", help="tokens (default: 16)")
    parser.add_argument(
        "--warm-runs", type=_at_least(1), default=2, metavar="N", help="after the cold one (default: 2)"
    )
    parser.add_argument("--run-pairs", type=_at_least(0), default=0, metavar="N",
                        help="also N times `quire run` to its first token, turn about with `import torch`")  # fmt: skip
    parser.add_argument("--max-beyond", type=float, metavar="S", help="exit 2 if `quire run` takes so much longer")
    parser.add_argument("--max-cold", type=float, metavar="S", help="exit 2 if the cold start takes longer")
    parser.add_argument("--max-warm", type=float, metavar="S", help="exit 2 if the median warm start takes longer")
    _add_json(parser)
    add_config_flags(parser)


def _add_gap(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "gap",
        help="whether the GPU ever waits for the loop",
        description="Decode with many rows and time each step on the host and on the device, and the pauses between.",
    )
    parser.add_argument("--rows", type=_at_least(1), default=256, metavar="N", help="requests that run (default: 256)")
    parser.add_argument("--prompt-len", type=_at_least(1), default=64, metavar="N", help="tokens (default: 64)")
    parser.add_argument("--steps", type=_at_least(1), default=200, metavar="N", help="that are timed (default: 200)")
    parser.add_argument(
        "--max-idle", type=float, metavar="X", help="exit 2 if the device waits for more than this share"
    )
    _add_json(parser)
    add_config_flags(parser)


def _targets(text: str) -> tuple[float | None, ...]:
    targets: list[float | None] = []
    for word in text.split(","):
        try:
            targets.append(None if word == "off" else float(word))
        except ValueError:
            raise ArgumentTypeError(f"{word!r} is neither off nor a number of milliseconds") from None
        if not 0.1 <= (targets[-1] or 1.0) <= 1e6:
            raise ArgumentTypeError(f"{word} ms is no target")
    return tuple(targets)


def _add_growth(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "growth",
        help="memory after many requests",
        description="Resident memory after some short requests and after many; it must not grow.",
    )
    parser.add_argument("--first", type=_at_least(1), default=200, metavar="N",
                        help="requests before the first reading (default: 200)")  # fmt: skip
    parser.add_argument("--last", type=_at_least(2), default=2000, metavar="N",
                        help="requests before the second (default: 2000)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="what to draw prompts from (default: 0)")
    _add_json(parser)
    add_config_flags(parser)


def _add_llama_cpp(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "compare-llama-cpp",
        help="this engine beside llama.cpp on a CPU",
        description="One stream, a long prompt and 16 streams, turn about with llama.cpp (llama-cpp-python must be "
        "installed), on a GGUF file as it is and as Q4_0; then how often either agrees with float32.",
    )
    parser.add_argument("--rounds", type=_at_least(1), default=5, metavar="N", help="rounds (default 5)")
    _add_json(parser)
    add_config_flags(parser, groups=ENGINE_TABLES)


def _add_quality(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "quality",
        usage="quire bench quality --text FILE [options]",
        help="what quantized weights cost, against float32",
        description="Perplexity of a text and divergence from the same model in float32, on a CPU.",
    )
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="a plain text, long enough")
    parser.add_argument("--stretches", type=_at_least(1), default=8, metavar="N", help="how many (default 8)")
    parser.add_argument("--length", type=_at_least(2), default=1024, metavar="N", help="tokens of each (default 1024)")
    _add_json(parser)
    add_config_flags(parser, groups=ENGINE_TABLES)


def _add_json(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def _at_least(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise ArgumentTypeError(f"{text!r} is not a whole number of at least {low}")
        return int(text)

    return parse


# ---------------------------------------------------------------------------------------------------------------------
# The benchmarks


def _offline(args: Namespace, open_llm: OpenLLM) -> Report:
    from quire.bench.offline import bench_offline

    config, works = config_from_args(args), _works(args)
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
                print_note(f"token ids were taken modulo {size}, the model's vocabulary: {work.name} goes up to 10000.")
            reports.append(report)
    if len(reports) == 1:
        return reports[0]
    return {"benchmark": "offline", "works": reports, "pass": all(report["pass"] for report in reports)}


def _works(args: Namespace) -> list[Work]:
    """The work by name or from the file. What is wrong with either shows here, before a model loads."""
    from quire.bench.offline import Work
    from quire.bench.workloads import draw_workload, make_job, read_jobs

    make_job([0], 1, "", args.temperature, args.seed)
    if args.workload is not None:
        draws = {name: partial(draw_workload, name, temperature=args.temperature) for name in args.workload}
        return [Work(name, draw, may_fold=True) for name, draw in draws.items()]
    read = partial(read_jobs, args.requests, temperature=args.temperature)
    read(args.seed)
    return [Work(args.requests.name, read, may_fold=False)]


def _batch(args: Namespace, open_llm: OpenLLM) -> Report:
    from quire.bench.batching import bench_batch

    config = config_from_args(args)
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

    config = config_from_args(args)
    load = Load(args.decodes, args.decode_len, args.prompts, args.prompt_len, args.every, args.fresh_tail, args.alone)
    return bench_latency(lambda: open_llm(config), load, targets_ms=args.targets, seed=args.seed)


def _start(args: Namespace, open_llm: OpenLLM) -> Report:
    from quire.bench.start import bench_start

    return bench_start(
        config_from_args(args),
        prompt_len=args.prompt_len,
        warm_runs=args.warm_runs,
        run_pairs=args.run_pairs,
        max_beyond_s=args.max_beyond,
        max_cold_s=args.max_cold,
        max_warm_s=args.max_warm,
    )


def _gap(args: Namespace, open_llm: OpenLLM) -> Report:
    from quire.bench.gap import bench_gap

    config = config_from_args(args)
    return bench_gap(lambda: open_llm(config), rows=args.rows, prompt_len=args.prompt_len, steps=args.steps,
                     max_idle_share=args.max_idle)  # fmt: skip


def _growth(args: Namespace, open_llm: OpenLLM) -> Report:
    from quire.bench.growth import bench_growth, fit_cache

    if args.first >= args.last:
        raise QuireError("usage", f"--first {args.first} is not before --last {args.last}.", "Swap them.")
    config = fit_cache(config_from_args(args), args.first)
    return bench_growth(lambda: open_llm(config), first=args.first, last=args.last, seed=args.seed)


def _scheduler(args: Namespace, open_llm: OpenLLM) -> Report:
    from quire.bench.scheduling import bench_scheduler

    return bench_scheduler()


def _kernels(args: Namespace, open_llm: OpenLLM) -> Report:
    import torch

    if not torch.cuda.is_available():
        raise QuireError("no_device", "No CUDA device is usable here, so there are no kernels to time.")
    from quire.bench.kernels import run as run_kernels

    return {
        "benchmark": "kernels",
        "results": [result.as_dict() for result in run_kernels(only=args.only)],
        "pass": True,
    }


def _llama_cpp(args: Namespace, open_llm: OpenLLM) -> Report:
    from quire.bench.llama_cpp import bench_llama_cpp
    from quire.config_build import override_config
    from quire.files.source import resolve_model
    from quire.files.store import cache_dir
    from quire.machine import read_machine

    config = config_from_args(args)
    files = resolve_model(config.model.model, offline=config.model.offline)
    if files.kind != "gguf":
        raise QuireError("usage", f"{files.name} is no GGUF file.", "Give one that both sides can read.")
    folder = cache_dir() / "bench"
    folder.mkdir(parents=True, exist_ok=True)

    def open_file(path: Path, **knobs: Any) -> Any:
        return open_llm(override_config(config, {**knobs, "model": str(path)}))

    threads = config.engine.threads or read_machine().num_usable_cores
    return bench_llama_cpp(open_file, files.path, folder, threads=threads, rounds=args.rounds, say=print_note)


def _quality(args: Namespace, open_llm: OpenLLM) -> Report:
    from quire.bench.quality import bench_quality

    try:
        text = args.text.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise QuireError("usage", f"{args.text} can't be read: {error}.", "Give a plain text file.") from None
    return bench_quality(config_from_args(args), text, stretches=args.stretches, length=args.length)


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
}
