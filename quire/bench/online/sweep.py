"""Runs of the online benchmark at several rates, one after the other: their table, and a page with plots.

`quire bench online --rate 1,2,4,8` makes them. The report has every run, each as a run alone would report it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.bench.online.plots import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    draw_dot,
    draw_grid,
    draw_svg,
    show_number,
    show_seconds,
)
from quire.bench.online.report import card, describe_work, escape, figure_table, warnings, whole_page
from quire.bench.stats import Report
from quire.bench.tables import format_rate, print_gates, print_table

HEADINGS = ("requests/s", "answered", "completed/s", "output tok/s", "TTFT p50", "TTFT p99", "TPOT p50", "good")


def sweep_report(reports: Sequence[Report]) -> Report:
    """One report of several runs, slowest rate first as they ran."""
    first = reports[0]
    bars = [bar for report in reports for bar in report["bars"]]
    return {
        "benchmark": "online-sweep",
        "url": first["url"],
        "model": first["model"],
        "runs": list(reports),
        "bars": bars,
        "pass": all(report["pass"] for report in reports),
    }


def show_sweep(report: Report) -> None:
    from rich.console import Console  # imported late, since it takes 0.1 s

    console = Console(highlight=False, markup=False, emoji=False)
    print_table(console, f"{report['model']} at {len(report['runs'])} rates", HEADINGS, _rows(report))
    for run in report["runs"]:
        for warning in warnings(run):
            console.print(f"at {run['work']['rate']:g} requests/s: {warning}", style="yellow", soft_wrap=True)
    print_gates(console, report["bars"])


def render_sweep(report: Report) -> str:
    title = f"{report['model']} at {len(report['runs'])} rates"
    runs = report["runs"]
    plots = (
        ("Time to first token", "ttft_s", show_seconds),
        ("Time per output token", "tpot_s", show_seconds),
        ("Output tokens per second", "output_tps", show_number),
    )
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(describe_work(runs[0]["work"]))} · {escape(report["url"])}</p>',
        '<p><span class="key a">median</span> <span class="key b">p99</span></p>',
        '<div class="cards">',
        *(card(f"{name} by rate", rate_plot(name, runs, key, shown)) for name, key, shown in plots),
        card("Figures", figure_table(HEADINGS, _rows(report)), wide=True),
        "</div>",
    ]
    return whole_page(title, body)


def rate_plot(name: str, runs: Sequence[Report], key: str, shown: Callable[[float], str]) -> str:
    """Plot one figure of each run over its rate: the median and p99 of latencies, or a single figure."""
    shares = ("p50", "p99") if isinstance(runs[0][key], dict) or runs[0][key] is None else (None,)
    lines = []
    for share in shares:
        points = [(run["work"]["rate"], run[key] if share is None else (run[key] or {}).get(share)) for run in runs]
        lines.append([(rate, value) for rate, value in points if value is not None])
    values = [value for line in lines for _, value in line]
    x = Axis(0.0, max(run["work"]["rate"] for run in runs) * 1.06, LEFT, WIDTH - RIGHT)
    y = Axis(0.0, max(values, default=0.0) * 1.08 or 1.0, HEIGHT - BOTTOM, TOP)
    parts = [draw_grid(x, y, lambda rate: f"{rate:g}", shown, "requests per second")]
    for style, share, line in zip("ab", shares, lines, strict=False):
        corners = [f"{x(rate):.1f} {y(value):.1f}" for rate, value in line]
        if corners:
            parts.append(f'<path class="line {style}" d="M{"L".join(corners)}"/>')
        label = f"{share} " if share else ""
        parts += [
            draw_dot(x(rate), y(value), style, f"{rate:g} requests/s: {label}{shown(value)}") for rate, value in line
        ]
    return draw_svg(f"{name} over the rate of requests", parts)


def _rows(report: Report) -> list[tuple[str, ...]]:
    return [_row(run) for run in report["runs"]]


def _row(run: Report) -> tuple[str, ...]:
    def latency(key: str, share: str) -> str:
        return show_seconds(run[key][share]) if run[key] else "–"

    return (
        f"{run['work']['rate']:g}",
        f"{run['answered']} of {run['answered'] + run['failed']}",
        "–" if run["rates"]["answered_rps"] is None else f"{run['rates']['answered_rps']:.3g}",
        format_rate(run["output_tps"]),
        latency("ttft_s", "p50"),
        latency("ttft_s", "p99"),
        latency("tpot_s", "p50"),
        f"{run['goodput']['share']:.1%}",
    )
