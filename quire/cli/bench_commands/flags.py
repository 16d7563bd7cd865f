"""Flags of the benchmarks: one function per benchmark, in the order of `quire bench --help`.

`quire.cli.bench` calls the functions in `FLAGS` when it builds its parser. Helpers for flags that several benchmarks
have (counts, seeds, gates) follow below.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.config_build import ENGINE_TABLES, add_config_flags


def _offline(benchmarks: Any) -> None:
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
        help='one {"prompt_token_ids": […], "max_tokens": n} per line, optionally with temperature and seed',
    )
    work.add_argument(
        "--workload",
        nargs="+",
        choices=tuple(WORKLOADS),
        help="workload drawn from the seed, the same for every engine; several share one loaded model",
    )
    add_seed_flag(parser, "seed of the workload")
    parser.add_argument(
        "--temperature",
        type=float,
        default=TEMPERATURE,
        metavar="X",
        help=f"0: greedy (default: {TEMPERATURE})",
    )
    add_count_flag(parser, "--repeat", 1, "runs, each with the next seed; the median is reported too")
    parser.add_argument("--no-warmup", action="store_true", help="skip the short untimed run before the first")
    _bar(parser, "--min-output-tps", "X", "if the median is below this")
    add_common_flags(parser)


def _tiers(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "tiers",
        help="first token from each tier of the KV cache",
        description="Time to the first token of prompts that are computed, or come from the device, host memory or "
        "disk, in one run, and the gaps of streams beside loads. A cache folder is made and deleted.",
    )
    default = (16, 64, 256, 1500)
    lengths_help = "tokens of the prompts (default: 16 64 256 1500)"
    parser.add_argument("--lengths", type=_at_least(2), nargs="+", default=default, metavar="N", help=lengths_help)
    add_count_flag(parser, "--rounds", 4, "prompts of each length", low=2)
    add_count_flag(parser, "--stream-tokens", 200, "tokens of each stream", low=48)
    add_seed_flag(parser)
    add_common_flags(parser, groups=ENGINE_TABLES)


def _batch(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "batch",
        help="one stream against a batch",
        description="Tokens per second of one greedy request and of a batch, alternating in the same run.",
    )
    add_count_flag(parser, "--batch", 16, "requests")
    add_count_flag(parser, "--prompt-len", 16, "tokens")
    add_count_flag(parser, "--output-len", 64, "tokens")
    add_count_flag(parser, "--rounds", 3, "rounds of both sides")
    add_seed_flag(parser)
    parser.add_argument("--gate", action="store_true", help="exit 2 if a bar is missed")
    add_common_flags(parser)


def _latency(benchmarks: Any) -> None:
    from quire.bench.latency import Load

    parser = benchmarks.add_parser(
        "latency",
        help="decodes and long prompts that delay each other",
        description="Gaps between tokens of running requests while long prompts arrive, and those prompts' time to the "
        "first token, without and with a step-time target; then a long prompt on an idle engine, cold and cached.",
    )
    load = Load()
    add_count_flag(parser, "--decodes", load.decodes, "running requests")
    add_count_flag(parser, "--decode-len", load.decode_len, "prompt tokens of each running request")
    add_count_flag(parser, "--prompts", load.prompts, "arriving prompts")
    add_count_flag(parser, "--prompt-len", load.prompt_len, "tokens of each arriving prompt")
    add_count_flag(parser, "--fresh-tail", load.fresh_tail, "tokens of the warm prompt that are not cached")
    _seconds(parser, "--every", load.every, "between arrivals")
    _seconds(parser, "--alone", load.alone_s, "of decodes without arriving prompts")
    _seconds(parser, "--rest", load.rest_s, "between prompts on an idle engine, since a hot GPU is slower")
    parser.add_argument(
        "--targets",
        type=_targets,
        default=(None, 50.0, 30.0),
        metavar="LIST",
        help="step-time targets in ms, or off, separated by commas (default: off,50,30)",
    )
    add_seed_flag(parser)
    add_common_flags(parser)


def _start(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "start",
        help="from starting a process to its first token",
        description="Start fresh processes and time them to the first token: one with an empty kernel "
        "cache, then some with a warm one.",
    )
    add_count_flag(parser, "--prompt-len", 16, "tokens")
    add_count_flag(parser, "--warm-runs", 2, "warm runs after the cold one")
    add_count_flag(
        parser, "--run-pairs", 0, "pairs of `quire run` to its first token and `import torch`, alternating", low=0
    )
    _bar(parser, "--max-beyond", "S", "if `quire run` takes this much longer than the import")
    _bar(parser, "--max-cold", "S", "if the cold start takes longer")
    _bar(parser, "--max-warm", "S", "if the median warm start takes longer")
    add_common_flags(parser)


def _gap(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "gap",
        help="idle time of the GPU between steps",
        description="Decode with many rows and time each step on host and device, and the device's idle time.",
    )
    add_count_flag(parser, "--rows", 256, "running requests")
    add_count_flag(parser, "--prompt-len", 64, "tokens")
    add_count_flag(parser, "--steps", 200, "timed steps")
    _bar(parser, "--max-idle", "X", "if the device idles for more than this share of the time")
    add_common_flags(parser)


def _adapters(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "adapters",
        help="the cost of LoRA adapters",
        description="Answer prompts with and without adapters, turn about, and load adapters while requests decode.",
    )
    add_count_flag(parser, "--streams", 16, "requests at once")
    add_count_flag(parser, "--adapters", 8, "adapters that these are spread over")
    add_count_flag(parser, "--rank", 16, "rank of each adapter")
    add_count_flag(parser, "--output-len", 64, "tokens")
    add_count_flag(parser, "--rounds", 5, "rounds of all sides")
    add_seed_flag(parser)
    add_common_flags(parser)


def _growth(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "growth",
        help="memory after many requests",
        description="Resident memory after some short requests and after many; it must not grow.",
    )
    add_count_flag(parser, "--first", 200, "requests before the first reading")
    add_count_flag(parser, "--last", 2000, "requests before the second", low=2)
    add_seed_flag(parser)
    add_common_flags(parser)


def _scheduler(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "scheduler",
        help="the cost of scheduling, without a model",
        description="Time plan and commit with a device that finishes at once, and how their cost grows.",
    )
    _json(parser)


def _kernels(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "kernels",
        help="each GPU kernel against the GPU's measured ceilings",
        description="Time every CUDA kernel, in TB/s or TFLOP/s, beside the GPU's measured ceilings.",
    )
    parser.add_argument("--only", default="", metavar="NAME", help="only kernels whose name contains this")
    _json(parser)


def _llama_cpp(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "compare-llama-cpp",
        help="this engine against llama.cpp on a CPU",
        description="One stream, a long prompt and 16 streams, alternating with llama.cpp (llama-cpp-python must be "
        "installed), on a GGUF file as it is and as Q4_0; then how often either agrees with float32.",
    )
    parser.add_argument(
        "--shape",
        metavar="NAMES",
        help="compare on random weights in these sizes instead, with the model's tokenizer: 0.8b, 3b, 8b, qwen3-moe "
        "(the files are kept; an 8b takes 5 GB)",
    )
    parser.add_argument("--types", metavar="TYPES", default="Q4_K_M", help="types of these files (default: Q4_K_M)")
    add_count_flag(parser, "--rounds", 5, "rounds")
    add_common_flags(parser, groups=ENGINE_TABLES)


def _quality(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "quality",
        usage="quire bench quality --text FILE [options]",
        help="the quality loss of quantized weights and KV cache against float32",
        description="Perplexity of a text and divergence from the same model in float32, on a CPU.",
    )
    parser.add_argument(
        "--text", type=Path, required=True, metavar="FILE", help="plain text with at least stretches × length tokens"
    )
    add_count_flag(parser, "--stretches", 8, "stretches of the text")
    add_count_flag(parser, "--length", 1024, "tokens of each", low=2)
    add_common_flags(parser, groups=ENGINE_TABLES)


FLAGS: tuple[Callable[[Any], None], ...] = (
    _offline,
    _batch,
    _tiers,
    _latency,
    _start,
    _gap,
    _growth,
    _adapters,
    _scheduler,
    _kernels,
    _llama_cpp,
    _quality,
)

# ---------------------------------------------------------------------------------------------------------------------
# Shared flags


def add_count_flag(parser: ArgumentParser, flag: str, default: int, what: str, low: int = 1) -> None:
    parser.add_argument(flag, type=_at_least(low), default=default, metavar="N", help=f"{what} (default: {default})")


def _seconds(parser: ArgumentParser, flag: str, default: float, what: str) -> None:
    parser.add_argument(flag, type=_duration, default=default, metavar="S", help=f"seconds {what} (default: {default})")


def add_seed_flag(parser: ArgumentParser, what: str = "seed of the prompts") -> None:
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=f"{what} (default: 0)")


def _bar(parser: ArgumentParser, flag: str, metavar: str, when: str) -> None:
    parser.add_argument(flag, type=float, metavar=metavar, help=f"exit 2 {when}")


def _json(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def add_common_flags(parser: ArgumentParser, **config_flags: Any) -> None:
    """Add the flags that every benchmark with a model has."""
    _json(parser)
    add_config_flags(parser, **config_flags)


def _at_least(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise ArgumentTypeError(f"{text!r} is not a whole number of at least {low}")
        return int(text)

    return parse


def _duration(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _targets(text: str) -> tuple[float | None, ...]:
    targets: list[float | None] = []
    for word in text.split(","):
        try:
            targets.append(None if word == "off" else float(word))
        except ValueError:
            raise ArgumentTypeError(f"{word!r} is neither off nor a number of milliseconds") from None
        if not 0.1 <= (targets[-1] or 1.0) <= 1e6:
            raise ArgumentTypeError(f"{word} ms is not within 0.1 to 1000000 ms")
    return tuple(targets)
