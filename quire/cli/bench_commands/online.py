"""`quire bench online` and `quire bench compare`: flags, and the arrivals that the flags plan.

`quire.cli.bench` calls these functions. Neither benchmark opens a model: a server's URL is enough.
"""

from __future__ import annotations

import math
import os
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.types import QuireError

if TYPE_CHECKING:
    from quire.bench.online.arrivals import Arrival, Lengths
    from quire.bench.stats import Report

MAX_COUNT = 1_000_000
MAX_RATES = 32


def add_online(benchmarks: Any) -> None:
    from quire.bench.workloads import TEMPERATURE

    parser = benchmarks.add_parser(
        "online",
        usage="quire bench online --url URL (--rate R | --trace FILE) --requests N [options]",
        help="open-loop load on a server",
        description="Send requests to an OpenAI-compatible server at planned times, whether it keeps up or not. "
        "Latencies count from the moment a request was due.",
    )
    parser.add_argument("--url", required=True, help="the server, such as http://127.0.0.1:8000")
    parser.add_argument("--model", metavar="NAME", help="model name (default: the first that the server lists)")
    parser.add_argument("--api-key", metavar="K", help="the server's key (default: QUIRE_API_KEY)")
    when = parser.add_mutually_exclusive_group(required=True)
    when.add_argument(
        "--rate",
        type=_rates,
        metavar="R",
        help="requests per second on average (Poisson); 1,2,4: one run after the other",
    )
    when.add_argument(
        "--trace", type=Path, metavar="FILE", help="arrivals and lengths of an Azure CSV or Mooncake JSONL"
    )
    parser.add_argument("--requests", type=_count, required=True, metavar="N", help="how many to send")
    parser.add_argument("--scale-time", type=_positive, metavar="X", help="multiply the trace's times (default: 1)")
    parser.add_argument("--scale-len", type=_positive, metavar="X", help="multiply the trace's lengths (default: 1)")
    parser.add_argument(
        "--input-len",
        type=_lengths,
        metavar="LEN",
        help="128, 100-1024 or lognormal:MEDIAN:SIGMA tokens (default: 128)",
    )
    parser.add_argument(
        "--output-len", type=_lengths, metavar="LEN", help="tokens of an answer, in the same form (default: 64)"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='one {"prompt": …}, {"prompt_token_ids": …} or {"messages": …} per line',
    )
    parser.add_argument("--chat", action="store_true", help="send chat messages instead of token ids")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="seed of arrivals, lengths and prompts (default: 0)"
    )
    parser.add_argument(
        "--temperature",
        type=_not_negative,
        default=TEMPERATURE,
        metavar="X",
        help=f"0: greedy (default: {TEMPERATURE})",
    )
    parser.add_argument(
        "--stop-at-eos", action="store_true", help="let answers end early; without it ignore_eos is sent"
    )
    parser.add_argument(
        "--ttft-target", type=_positive, metavar="MS", help="target for the time to first token, milliseconds"
    )
    parser.add_argument(
        "--tpot-target", type=_positive, metavar="MS", help="target for the time per output token, milliseconds"
    )
    parser.add_argument(
        "--min-goodput", type=_share, metavar="X", help="exit 2 if a smaller share of requests meets the targets"
    )
    parser.add_argument(
        "--max-open",
        type=_count,
        default=900,
        metavar="N",
        help="concurrent connections; the report shows if this delayed requests (default: 900)",
    )
    parser.add_argument(
        "--timeout",
        type=_positive,
        default=600.0,
        metavar="S",
        help="seconds until a request fails (default: 600)",
    )
    parser.add_argument("--no-warmup", action="store_true", help="skip the short untimed request before the first")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with plots")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def add_compare(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "compare",
        usage="quire bench compare A.json B.json [options]",
        help="two runs of the online benchmark",
        description="Is run B worse than run A? Ratios, with intervals by bootstrap. Both files are made with "
        "quire bench online --json.",
    )
    parser.add_argument("a", type=Path, metavar="A.json", help="the baseline run")
    parser.add_argument("b", type=Path, metavar="B.json", help="the run to judge")
    parser.add_argument(
        "--tolerance",
        type=_share,
        default=0.05,
        metavar="X",
        help="exit 2 if B is worse by more than this share (default: 0.05)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the bootstrap (default: 0)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with plots")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_COUNT:
        raise ArgumentTypeError(f"{text!r:.80} is not a whole number of 1 to {MAX_COUNT}")
    return int(text)


def _positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _rates(text: str) -> list[float]:
    rates = [_positive(one) for one in text.split(",")]
    if len(rates) > MAX_RATES:
        raise ArgumentTypeError(f"{len(rates)} rates are more than {MAX_RATES}")
    return rates


def _not_negative(text: str) -> float:
    value = _number(text)
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan  # fails every range check


def _lengths(text: str) -> Lengths:
    from quire.bench.online.arrivals import parse_lengths

    try:
        return parse_lengths(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def run_online(args: Namespace, open_llm: object) -> Report:
    rates = args.rate or [None]
    if len(rates) == 1:
        args.rate = rates[0]
        return _run_online(args)
    from quire.bench.online.sweep import render_sweep, sweep_report

    check_page(args.html)
    runs = [_run_online(Namespace(**{**vars(args), "rate": rate, "html": None})) for rate in rates]
    report = sweep_report(runs)
    write_page(args.html, render_sweep, report)
    return report


def _run_online(args: Namespace) -> Report:
    """One run, at one rate or of a trace."""
    from quire.bench.online.report import render_run
    from quire.bench.online.requests import RequestOptions, read_prompts
    from quire.bench.online.run import ClientLimits, Targets, bench_online, first_model
    from quire.bench.online.stream_client import parse_url

    arrivals, work = _planned(args)
    prompts = read_prompts(args.prompts) if args.prompts is not None else ()
    endpoint = parse_url(args.url, args.api_key or os.environ.get("QUIRE_API_KEY"))
    check_page(args.html)
    model = args.model if args.model is not None else first_model(endpoint)
    report = bench_online(
        endpoint,
        arrivals,
        RequestOptions(model, args.chat, args.temperature, not args.stop_at_eos, args.seed),
        work=work,
        prompts=prompts,
        targets=Targets(*(None if ms is None else ms / 1000 for ms in (args.ttft_target, args.tpot_target))),
        limits=ClientLimits(args.max_open, args.timeout),
        warmup=not args.no_warmup,
        min_goodput=args.min_goodput,
    )
    write_page(args.html, render_run, report)
    return report


def _planned(args: Namespace) -> tuple[list[Arrival], Report]:
    """Return the arrivals, and the description of the work by which two runs are compared."""
    from quire.bench.online.arrivals import Lengths, poisson_arrivals, read_trace

    work: Report = {
        "requests": args.requests,
        "seed": args.seed,
        "chat": args.chat,
        "temperature": args.temperature,
        "ignore_eos": not args.stop_at_eos,
    }
    if args.trace is not None:
        if args.input_len or args.output_len or args.prompts:
            what = "A trace has its own lengths: --input-len, --output-len and --prompts go with --rate."
            raise QuireError("usage", what, "Use --scale-len.")
        scales = {"scale_time": args.scale_time or 1.0, "scale_len": args.scale_len or 1.0}
        arrivals = read_trace(args.trace, args.requests, **scales)
        shares = any(arrival.blocks for arrival in arrivals)
        return arrivals, {**work, "trace": args.trace.name, **scales, "shares_prefixes": shares}
    if args.scale_time or args.scale_len:
        raise QuireError("usage", "--scale-time and --scale-len go with --trace.", "Change --rate or the lengths.")
    if args.prompts is not None and args.input_len:
        raise QuireError("usage", "--prompts and --input-len both set the prompts.", "Leave one out.")
    input_len, output_len = args.input_len or Lengths(128, 128), args.output_len or Lengths(64, 64)
    source = {"input_len": str(input_len)} if args.prompts is None else {"prompts": args.prompts.name}
    work |= {"rate": args.rate, **source, "output_len": str(output_len), "shares_prefixes": args.prompts is not None}
    return poisson_arrivals(args.rate, args.requests, args.seed, input_len, output_len), work


def run_compare(args: Namespace, _open_llm: object) -> Report:
    from quire.bench.online.compare import compare_runs, read_run
    from quire.bench.online.report import render_comparison

    a, b = read_run(args.a), read_run(args.b)
    check_page(args.html)
    report = compare_runs(a, b, args.tolerance, args.seed)
    write_page(args.html, render_comparison, a.report, b.report, report)
    return report


def check_page(path: Path | None) -> None:
    """Raise QuireError if the page can't be written, before anything is measured."""
    if path is not None:
        try:
            path.open("a").close()
        except OSError as error:
            raise _no_page(path, error) from None


def write_page(path: Path | None, render: Callable[..., str], *reports: Report) -> None:
    if path is not None:
        try:
            path.write_text(render(*reports), encoding="utf-8")
        except OSError as error:
            raise _no_page(path, error) from None


def _no_page(path: Path, error: OSError) -> QuireError:
    return QuireError("bad_path", f"{path} can't be written: {error.strerror or error}.", "Choose another --html.")
