"""`quire bench tiers`: its flags and how they become a `TierWork`. `quire.cli.bench` calls both functions."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from typing import TYPE_CHECKING, Any

from quire.cli.bench_flags import add_common_flags, add_count_flag, add_seed_flag
from quire.cli.run import OpenLLM
from quire.config_build import ENGINE_TABLES, config_from_args, override_config

if TYPE_CHECKING:
    from quire.bench.stats import Report


def add_tiers(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "tiers",
        help="first token from each tier of the KV cache",
        description="Time to the first token of prompts that are computed, or come from the device, host memory or "
        "disk, in one run, and the gaps of streams beside loads. A cache folder is made and deleted.",
    )
    parser.add_argument(
        "--lengths", type=_lengths, default=(16, 64, 256, 1500), metavar="LIST", help="(default: 16,64,256,1500)"
    )
    add_count_flag(parser, "--rounds", 4, "prompts of each length", low=2)
    add_count_flag(parser, "--stream-tokens", 200, "tokens of each stream", low=48)
    add_seed_flag(parser)
    add_common_flags(parser, groups=ENGINE_TABLES)


def run_tiers(args: Namespace, open_llm: OpenLLM) -> Report:
    from quire.bench.tiers import TierWork, bench_tiers

    config = config_from_args(args)
    work = TierWork(args.lengths, args.rounds, args.stream_tokens, args.seed)
    return bench_tiers(lambda knobs: open_llm(override_config(config, knobs)), work)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        values = tuple(sorted(int(word) for word in text.split(",")))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a list of lengths") from None
    if values[0] < 2 or values[-1] > 1 << 20 or len(set(values)) < len(values):
        raise ArgumentTypeError(f"{text!r} has a length twice, or one below 2 or above a million")
    return values
