"""`quire chaos`: inject every kind of fault into a server under traffic. Exits with 0 only if no token was lost."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from quire.chaos.kinds import KINDS, kinds_for
from quire.config import knobs
from quire.types import QuireError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "chaos",
        usage="quire chaos [options]",
        help="inject faults into a server and check that no token is lost",
        description="Start a server, send it mixed traffic, inject faults of every kind, and compare every answer with "
        "the answer without faults. Exit code 0: no token lost, duplicated or wrong, no page leaked; 1: otherwise.",
    )
    parser.add_argument("--model", default="smollm2", help="model to serve; tiny: a generated one of a few kilobytes")
    parser.add_argument("--minutes", type=float, default=1.0, help="least duration in minutes (default: 1)")
    parser.add_argument("--streams", type=int, default=8, help="concurrent requests (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the traffic and of the order of the faults")
    parser.add_argument("--faults", type=int, help=f"number of faults (default: one every 8 s, at least {len(KINDS)})")
    parser.add_argument("--kinds", help=f"only these, separated by commas, of: {', '.join(KINDS)}")
    parser.add_argument(
        "--hostile", type=float, default=0.1, metavar="X", help="share of requests that are hostile (default: 0.1)"
    )
    parser.add_argument("--max-tokens", type=int, default=48, help="most tokens of an answer (default: 48)")
    parser.add_argument("--deterministic", action="store_true", help="every answer must be the same to the byte")
    parser.add_argument("--hang-timeout", type=float, default=20.0, help="seconds until a stuck engine is replaced")
    parser.add_argument("--threads", type=int, help="CPU threads of the engine")
    parser.add_argument("--kernels", default="auto", help="kernels of the engine (torch: float32 throughout)")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share every layer; faults of ranks are added")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages; the same")
    parser.add_argument(
        "--speculate", help="proposers of drafts of the engine (default: the server's); answers are compared without"
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON on stdout")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the report as a Markdown page")


def run(args: Namespace) -> int:
    from quire.chaos.gate import run_gate  # imported late, so that --help is fast
    from quire.chaos.settings import ChaosSettings

    shortest = knobs()["hang_timeout"].low or 0.0  # the server's own lower bound
    for name, low in (
        ("minutes", 0.01),
        ("streams", 1),
        ("tp", 1),
        ("pp", 1),
        ("max_tokens", 2),
        ("hang_timeout", shortest),
    ):
        if getattr(args, name) < low:
            raise QuireError("usage", f"--{name.replace('_', '-')} must be at least {low:g}.")
    if not 0 <= args.hostile < 1:
        raise QuireError("usage", f"--hostile {args.hostile:g} is not a share of at least 0 and below 1.")
    possible = kinds_for(args.tp * args.pp)
    kinds = tuple(args.kinds.split(",")) if args.kinds else possible
    unknown = [kind for kind in kinds if kind not in possible]
    if unknown:
        raise QuireError("usage", f"There is no fault called {unknown[0]!r}.", f"There are {', '.join(possible)}.")
    settings = ChaosSettings(
        args.model,
        args.minutes * 60,
        args.streams,
        args.seed,
        args.deterministic,
        args.max_tokens,
        faults=args.faults,
        hang_timeout=args.hang_timeout,
        threads=args.threads,
        kernels=args.kernels,
        kinds=kinds,
        hostile=args.hostile,
        speculate=args.speculate,
        tp=args.tp,
        pp=args.pp,
    )
    say = _make_printer(args.json)
    report = asyncio.run(run_gate(settings, say))
    if args.report is not None:
        command = shlex.join(["quire", *sys.argv[1:]])
        args.report.write_text(f"# Chaos report\n\n{report.to_markdown(command)}", encoding="utf-8")
    if args.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        _show(report)
    return 0 if report.passed else 1


def _make_printer(quiet: bool) -> Any:
    def say(what: str) -> None:
        if not quiet:
            print(f"chaos: {what}", file=sys.stderr, flush=True)

    return say


def _show(report: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="Chaos", show_header=False)
    for name, value in report.rows():
        table.add_row(name, value)
    console.print(table)
    faults = Table("fault", "injected", title="Faults by kind")
    for kind, count in sorted(report.faults.items()):
        faults.add_row(kind, str(count))
    console.print(faults)
    for problem in report.problems[:20]:
        console.print(f"[red]problem[/red] {problem}", markup=True, highlight=False)
    console.print(f"{'passed' if report.passed else 'FAILED'}; the server's log: {report.log}", highlight=False)
