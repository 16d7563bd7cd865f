"""Prints a benchmark's report as tables on stdout. `quire bench` calls `show` unless --json was given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from quire.bench.stats import SHARES, Report

if TYPE_CHECKING:
    from rich.console import Console

BAR_WIDTH = 32


def show(report: Report) -> None:
    from rich.console import Console  # imported late, since it takes 0.1 s

    console = Console(highlight=False, markup=False, emoji=False)
    _DRAW[report["benchmark"]](console, report)
    print_gates(console, report["bars"])


def print_table(console: Console, title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table whose first column holds names and whose other columns hold figures."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(headings))
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(title, style="bold", soft_wrap=True)
    console.print(table)


def print_gates(console: Console, bars: Sequence[Report]) -> None:
    for bar in bars:
        verdict, style = ("pass", "green") if bar["pass"] else ("FAIL", "red bold")
        console.print(verdict, style=style, end="")
        value = f"{bar['value']:.3f}" if bar["value"] < 100 else format_rate(bar["value"])
        console.print(f"  {bar['name']}: {value} ({bar['sense']} {bar['bar']:g})", soft_wrap=True)


# ---------------------------------------------------------------------------------------------------------------------
# Offline


def _offline(console: Console, report: Report) -> None:
    runs, figures = report["runs"], report["median"]
    if len(runs) > 1:
        columns = ("seed", "out tok/s", "wall", "TTFT p50", "p99", "ITL p50", "p99")
        print_table(
            console, f"{report['model']}, {report['work']}: every run", columns, [_run_line(run) for run in runs]
        )
    what = "median of the runs" if len(runs) > 1 else f"seed {runs[0]['seed']}"
    print_table(console, f"{report['model']}, {report['work']}, {what}", ("", ""), _figures(report, figures))
    latencies = [("time to first token", figures.get("ttft_s")), ("time between tokens", figures.get("itl_s"))]
    print_table(console, "Latency", ("", *SHARES), [(name, *format_latencies(values)) for name, values in latencies])
    last = runs[-1]
    for name, label in (("rows_per_step", "Rows a step"), ("tokens_per_step", "Tokens a step")):
        console.print(f"{label}: mean {last[name]['mean']:.1f}, max {last[name]['max']}", style="bold")
        for line in _histogram(last[name]["histogram"]):
            console.print(line, soft_wrap=True)
        console.print()
    _environment(console, report)


def _environment(console: Console, report: Report) -> None:
    """Print the settings that the figures depend on, and a warning if the machine was busy."""
    options, load = report["settings"], report["load_before"]
    shown = ("device", "dtype", "max_rows", "max_batch_tokens", "depth", "num_cores")
    console.print(" · ".join(f"{name} {options[name]}" for name in shown), style="dim", soft_wrap=True)
    if load is not None and load > options["num_cores"] / 2:
        busy = f"The machine was busy before this began (load {load:.1f} on {options['num_cores']} cores)"
        console.print(f"{busy}: the figures are worse than on an idle machine.", style="yellow", soft_wrap=True)


def _run_line(run: Report) -> tuple[str, ...]:
    first, between = run["ttft_s"], run["itl_s"] or {}
    return (
        str(run["seed"]),
        format_rate(run["output_tps"]),
        format_seconds(run["wall_s"]),
        format_seconds(first["p50"]),
        format_seconds(first["p99"]),
        format_seconds(between.get("p50")),
        format_seconds(between.get("p99")),
    )


def _figures(report: Report, figures: Report) -> list[tuple[str, str]]:
    memory, start = report["memory"], report["start"]
    lines = [
        ("output", f"{format_rate(figures['output_tps'])} tok/s"),
        ("prompt and output", f"{format_rate(figures['total_tps'])} tok/s"),
        ("wall time", format_seconds(figures["wall_s"])),
        ("requests", format_count(figures["requests"])),
        ("prompt tokens", format_count(figures["prompt_tokens"])),
        ("output tokens", format_count(figures["output_tokens"])),
        ("steps", format_count(figures["steps"])),
        ("cache hits", f"{format_count(figures['cache_hit_tokens'])} tokens ({figures['cache_hit_ratio']:.1%})"),
        (
            "preemptions",
            f"{format_count(figures['preemptions'])} (swapped {format_count(figures['swaps'])}, "
            f"recomputed {format_count(figures['recomputes'])})",
        ),
        ("peak memory", format_size(memory["peak_rss_bytes"])),
        ("start to ready", format_seconds(start["ready_s"])),
        ("start to first token", format_seconds(start["first_token_s"])),
    ]
    if memory["peak_cuda_bytes"] is not None:
        lines.insert(-2, ("peak GPU memory", format_size(memory["peak_cuda_bytes"])))
    return lines


def format_latencies(values: Report | None) -> tuple[str, ...]:
    return tuple(format_seconds((values or {}).get(name)) for name in SHARES)


def _histogram(buckets: Sequence[Report]) -> list[str]:
    """Return one line per range that occurred."""
    filled = [bucket for bucket in buckets if bucket["steps"]]
    most = max(bucket["steps"] for bucket in filled)
    lines = []
    for bucket in filled:
        low, high, num_steps = bucket["low"], bucket["high"], bucket["steps"]
        name = str(low) if low == high else f"{low} to {high}"
        lines.append(f" {name:>14}  {num_steps:>8,} steps  {'█' * -(-num_steps * BAR_WIDTH // most)}")
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# Other benchmarks


def _batch(console: Console, report: Report) -> None:
    rounds = [
        (str(index + 1), format_rate(pair["one"]), format_rate(pair["batch"]), f"{pair['batch'] / pair['one']:.2f}×")
        for index, pair in enumerate(report["rounds"])
    ]
    rounds.append(
        ("median", format_rate(report["one_tps"]), format_rate(report["batch_tps"]), f"{report['ratio']:.2f}×")
    )
    title = f"{report['model']}: output tok/s, {report['prompt_len']} tokens in and {report['output_len']} out"
    print_table(console, title, ("round", "one stream", f"batch of {report['batch']}", "gain"), rounds)
    _environment(console, report)


def _adapters(console: Console, report: Report) -> None:
    base = report["median_tps"]["base"]
    named = {"base": "base model", "none": "no adapter, beside loaded ones", "adapters": "over the adapters"}
    rows = [(named[side], format_rate(rate), f"{rate / base:.2f}") for side, rate in report["median_tps"].items()]
    title = f"{report['model']}: {report['streams']} streams, {report['adapters']} adapters of rank {report['rank']}"
    print_table(console, title, ("", "out tok/s", "of the base"), rows)
    gaps = [(name, *format_latencies(values)) for name, values in report["gap_s"].items()]
    print_table(console, "Time between steps", ("", *SHARES), gaps)
    _environment(console, report)


def _tiers(console: Console, report: Report) -> None:
    rows = [
        (f"{one['tokens']} tokens", *(format_seconds(one[name]) for name in ("cold", "device", "host", "disk")))
        for one in report["lengths"]
    ]
    headings = ("prompt", "computed", "device", "host memory", "disk")
    print_table(console, f"{report['model']}: time to the first token, median", headings, rows)
    rates = [
        ("copied in host memory", f"{report['copy_rate'] / 1e6:.0f} MB/s"),
        ("read from disk", f"{report['read_rate'] / 1e6:.0f} MB/s"),
        ("computed", f"{report['recompute_rate'] / 1e6:.1f} MB/s: the break-even, below which no load pays"),
    ]
    print_table(console, f"{report['bytes'] / 1e6:.1f} MB of the longest prompt", ("", ""), rates)
    counts = [(name, *map(format_count, one.values())) for name, one in report["tiers"].items()]
    print_table(console, "Tiers", ("", "hits", "stores", "drops", "failures", "corrupt"), counts)
    _environment(console, report)


def _latency(console: Console, report: Report) -> None:
    load = report["load"]
    title = (
        f"{report['model']}: {load['decodes']} decodes from {load['decode_len']} tokens on; "
        f"{load['prompts']} prompts of {load['prompt_len']} tokens, one every {load['every']:g} s"
    )
    rows = []
    for part in report["under_load"]:
        target = "no target" if part["target_ms"] is None else f"target {part['target_ms']:g} ms"
        rows.append((f"{target}: gap, decodes alone", *format_latencies(part["gap_alone_s"])))
        rows.append((f"{target}: gap while prompts arrive", *format_latencies(part["gap_s"])))
        rows.append((f"{target}: those prompts' first token", *format_latencies(part["ttft_s"])))
    print_table(console, title, ("", *SHARES), rows)
    idle = report["idle"]
    lines = [
        ("cold", format_seconds(idle["cold_ttft_s"])),
        (f"{format_count(idle['warm_cached_tokens'])} tokens cached", format_seconds(idle["warm_ttft_s"])),
    ]
    print_table(console, f"First token of {load['prompt_len']} tokens on an idle engine", ("", ""), lines)
    _environment(console, report)


def _start(console: Console, report: Report) -> None:
    phases = ("kernels tried", "model loaded", "first token", "tenth token")
    names = ("tried_s", "ready_s", "first_token_s", "tenth_token_s")
    runs = [("cold", report["cold"]), *((f"warm {i + 1}", run) for i, run in enumerate(report["warm_runs"]))]
    rows = [
        (name, *(format_seconds(run[phase]) for phase in names))
        for name, run in [*runs, ("warm, median", report["warm"])]
    ]
    title = f"{report['model']}: seconds since the process was started, {report['prompt_len']} tokens in"
    print_table(console, title, ("kernel cache", *phases), rows)
    if "run" in report:
        run = report["run"]
        times = [(f"{i + 1}", *map(format_seconds, pair)) for i, pair in enumerate(run["pairs"])]
        middle = ("median", format_seconds(run["import_torch_s"]), format_seconds(run["first_token_s"]))
        print_table(console, "Alternating runs", ("", "import torch", "first token of quire run"), [*times, middle])


def _gap(console: Console, report: Report) -> None:
    rows = [
        ("turn of the loop", *format_latencies(report["turn_s"])),
        ("host without that wait", *format_latencies(report["host_s"])),
    ]
    rows += [(f"  {kind}", *format_latencies(each)) for kind, each in report["host_parts_s"].items()]
    rows.append(("host waits for tokens", *format_latencies(report["wait_s"])))
    if report["device_s"] is not None:
        rows.append(("device, a step", *format_latencies(report["device_s"])))
        rows.append(("device idle before it", *format_latencies(report["device_idle_s"])))
    print_table(console, f"{report['model']}: {report['rows']} rows, {report['steps']} steps", ("", *SHARES), rows)
    if report["device_idle_share"] is not None:
        console.print(f"The device was idle {report['device_idle_share']:.2%} of the time.", style="bold")
    _environment(console, report)


def _growth(console: Console, report: Report) -> None:
    readings = [
        (
            format_count(reading["requests"]),
            format_size(reading["rss_bytes"]),
            format_size(reading["rss_unsettled_bytes"]),
        )
        for reading in report["readings"]
    ]
    headings = ("requests so far", "resident memory", "before malloc_trim")
    print_table(console, f"{report['model']}: growth", headings, readings)


def _scheduler(console: Console, report: Report) -> None:
    headings = ("rows", "plan", "commit", "plan and commit, a row", "whole loop")
    names = ("plan_us", "commit_us", "plan_and_commit_us_per_row", "loop_us")
    steps = [(str(step["rows"]), *(format_micros(step[name]) for name in names)) for step in report["steps"]]
    print_table(console, "One step, all rows decoding", headings, steps)
    prompts = [
        (
            *(format_count(prompt[name]) for name in ("tokens", "cached", "page_tokens")),
            "yes" if prompt["evicts"] else "no",
            *(format_micros(prompt[name]) for name in ("plan_us", "commit_us", "books_us")),
        )
        for prompt in report["prompts"]
    ]
    headings_of_prompts = ("tokens", "cached", "page", "evicts others", "plan", "commit", "commit after the token")
    print_table(console, "One long prompt", headings_of_prompts, prompts)
    sides = (
        ("a step, requests waiting", report["waiting"], "few", "many"),
        ("matching, prompt tokens", report["matching"], "short", "long"),
        ("a step, tokens of the next", report["blocked"], "short", "long"),
    )
    growth = [
        (
            name,
            format_count(costs[low]),
            format_micros(costs[f"{low}_us"]),
            format_count(costs[high]),
            format_micros(costs[f"{high}_us"]),
            f"{costs['ratio']:.2f}×",
        )
        for name, costs, low, high in sides
    ]
    print_table(console, "Growth", ("", "few", "cost", "many", "cost", "ratio"), growth)


# ---------------------------------------------------------------------------------------------------------------------
# llama.cpp and quality


def _llama_cpp(console: Console, report: Report) -> None:
    for form, result in report["files"].items():
        rows: list[tuple[str, ...]] = [
            (work, f"{result[work]['ours']:.1f}", f"{result[work]['theirs']:.1f}", f"{result[work]['ratio']:.2f}")
            for work in ("one stream", "prefill", "16 streams")
        ]
        agreement = result["agreement"]
        rows.append(("tokens as float32", *(str(agreement[side]["tokens"]) for side in ("ours", "theirs")), ""))
        rows.append(("whole answers", *(str(agreement[side]["whole"]) for side in ("ours", "theirs")), ""))
        title = f"{form}, {report['threads']} threads, median of {report['rounds']}"
        print_table(console, title, ("", "quire tok/s", "llama.cpp tok/s", "ratio"), rows)


def _quality(console: Console, report: Report) -> None:
    rows = [
        ("perplexity", f"{report['perplexity']:.3f}"),
        ("of float32", f"{report['float32_perplexity']:.3f}"),
        ("divergence from float32, nats a token", f"{report['kl']:.5f}"),
        ("same most likely token", f"{report['same_top']:.2%}"),
    ]
    print_table(console, f"{report['tokens']} tokens", ("", ""), rows)


_DRAW = {
    "compare-llama-cpp": _llama_cpp,
    "quality": _quality,
    "offline": _offline,
    "batch": _batch,
    "tiers": _tiers,
    "adapters": _adapters,
    "latency": _latency,
    "start": _start,
    "gap": _gap,
    "growth": _growth,
    "scheduler": _scheduler,
}


# ---------------------------------------------------------------------------------------------------------------------
# Formats


def format_rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def format_count(value: Any) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"  # a median can be a half


def format_seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def format_micros(value: float) -> str:
    return f"{value:.1f} µs" if value < 1000 else f"{value / 1000:.2f} ms"


def format_size(value: int) -> str:
    return f"{value / (1 << 20):,.1f} MiB"
