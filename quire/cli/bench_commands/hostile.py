"""`quire bench hostile`: its flags and how they become `HostileSettings`. `quire.cli.bench` calls both functions."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from quire.cli.output import print_note
from quire.types import QuireError

if TYPE_CHECKING:
    from quire.bench.stats import Report


def add_hostile(benchmarks: Any) -> None:
    from quire.bench.hostile.attacks import KINDS

    parser = benchmarks.add_parser(
        "hostile",
        help="a server under hostile input, beside streams",
        description="Start a server, run each kind of attack alone and then all at once, and report the event "
        "loop's delay, memory, and the tokens that concurrent streams lost.",
    )
    parser.add_argument("--model", default="smollm2", help="model to serve; tiny: a generated one of a few kilobytes")
    parser.add_argument("--kinds", metavar="LIST", help=f"only these, separated by commas, of: {', '.join(KINDS)}")
    parser.add_argument("--seconds", type=float, default=8.0, metavar="S", help="seconds of each phase (default: 8)")
    parser.add_argument("--streams", type=int, default=16, metavar="N", help="streams beside the attacks (default: 16)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads of the engine (default: 1)")
    parser.add_argument(
        "--rounds", type=int, default=200, metavar="N", help="most repetitions of each attack (default: 200)"
    )
    parser.add_argument(
        "--flood-mb",
        type=float,
        default=40,
        metavar="MB",
        help="most MiB that one connection sends (default: 40)",
    )
    parser.add_argument("--connections", type=int, default=400, metavar="N", help="idle connections (default: 400)")
    parser.add_argument("--small", action="store_true", help="send small requests of each kind")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run_hostile(args: Namespace, _open_llm: object) -> Report:
    from quire.bench.hostile.attacks import KINDS
    from quire.bench.hostile.run import HostileSettings, bench_hostile

    for name, low in (
        ("seconds", 0.1),
        ("streams", 1),
        ("threads", 1),
        ("rounds", 1),
        ("flood_mb", 1),
        ("connections", 4),
    ):
        if getattr(args, name) < low:
            raise QuireError("usage", f"--{name.replace('_', '-')} must be at least {low:g}.")
    kinds = tuple(args.kinds.split(",")) if args.kinds else KINDS
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise QuireError("usage", f"There is no attack called {unknown[0]!r}.", f"There are {', '.join(KINDS)}.")
    return bench_hostile(
        HostileSettings(
            args.model,
            kinds,
            args.seconds,
            args.streams,
            threads=args.threads,
            rounds=args.rounds,
            flood_bytes=int(args.flood_mb * 2**20),
            connections=args.connections,
            small=args.small,
        ),
        print_note,
    )
