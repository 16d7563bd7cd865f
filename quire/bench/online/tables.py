"""Prints reports of the online benchmark and of comparisons as tables on stdout."""

from __future__ import annotations

from quire.bench.online.report import describe_work, show_figure, show_interval, show_ratio, warnings
from quire.bench.stats import SHARES, Report
from quire.bench.tables import format_count, format_latencies, format_rate, format_seconds, print_gates, print_table

LATENCIES = (
    ("time to first token", "ttft_s"),
    ("time per output token", "tpot_s"),
    ("between pieces", "itl_s"),
    ("longest pause", "pause_s"),
    ("end to end", "e2e_s"),
)


def show_online(report: Report) -> None:
    from rich.console import Console  # imported late, since it takes 0.1 s

    console = Console(highlight=False, markup=False, emoji=False)
    print_table(console, f"{report['model']}: {describe_work(report['work'])}", ("", ""), _figures(report))
    rows = [(name, *format_latencies(report[key])) for name, key in LATENCIES]
    rows.append(("client lag", *format_latencies(report["client"]["lag_s"])))
    print_table(console, "Latency", ("", *SHARES), rows)
    if report["failures"]:
        failures = [(failure["outcome"], format_count(failure["count"])) for failure in report["failures"]]
        print_table(console, "Failures", ("", "requests"), failures)
        for failure in report["failures"]:
            console.print(f"{failure['outcome']}: {failure['example']}", style="dim", soft_wrap=True)
    for warning in warnings(report):
        console.print(warning, style="yellow", soft_wrap=True)
    print_gates(console, report["bars"])


def _figures(report: Report) -> list[tuple[str, str]]:
    rates, goodput, targets = report["rates"], report["goodput"], report["targets"]
    lines = [
        ("answered", f"{format_count(report['answered'])} of {format_count(report['answered'] + report['failed'])}"),
        ("wall time", format_seconds(report["wall_s"])),
        ("offered", _per_second(rates["offered_rps"])),
        ("sent", _per_second(rates["sent_rps"])),
        ("completed", _per_second(rates["answered_rps"])),
        ("output", f"{format_rate(report['output_tps'])} tok/s"),
        ("prompt and output", f"{format_rate(report['total_tps'])} tok/s"),
        ("prompt tokens", f"{format_count(report['prompt_tokens'])} ({format_count(report['cached_tokens'])} cached)"),
        ("output tokens", format_count(report["output_tokens"])),
        ("in flight", f"{report['timeline']['mean_in_flight']:.1f} (at most {report['client']['most_open']})"),
    ]
    if any(targets.values()):
        limits = (("TTFT", targets["ttft_s"]), ("TPOT", targets["tpot_s"]))
        lines.append(
            ("targets", ", ".join(f"{name} {format_seconds(value)}" for name, value in limits if value is not None))
        )
        lines.append(("goodput", f"{_per_second(goodput['rps'])} ({goodput['share']:.1%})"))
    return lines


def _per_second(rate: float | None) -> str:
    return "all at once" if rate is None else f"{rate:.3g} requests/s"


def show_comparison(report: Report) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    for side in ("a", "b"):
        run = report[side]
        console.print(f"{side.upper()}  {run['model']}: {describe_work(run['work'])}", soft_wrap=True)
    rows = [
        (
            figure["name"],
            show_figure(figure, figure["a"]),
            show_figure(figure, figure["b"]),
            show_ratio(figure["ratio"]),
            show_interval(figure),
            figure["verdict"],
        )
        for figure in report["figures"]
    ]
    headings = ("", "A", "B", "B / A", f"{report['confidence']:.0%} interval", "verdict")
    print_table(console, "Comparison", headings, rows)
    for note in report["notes"]:
        console.print(note, style="yellow", soft_wrap=True)
    worse = [figure["name"] for figure in report["figures"] if figure["verdict"] == "worse"]
    verdict, style = ("pass", "green") if report["pass"] else ("FAIL", "red bold")
    console.print(verdict, style=style, end="")
    what = f"B is worse in {', '.join(worse)}" if worse else "B is not worse than A"
    console.print(f"  {what} (tolerance {report['tolerance']:.0%})", soft_wrap=True)
