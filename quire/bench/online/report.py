"""The online benchmark's HTML report: figures, plots and failures of a run, or two runs side by side.

`quire bench online --html` and `quire bench compare --html` write it. The page is self-contained, without scripts, and
its Content-Security-Policy forbids external resources. It is also well-formed XML, so that tools can parse it.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from quire.bench.online.plots import Line, cdf_plot, course_plot, dots_plot, show_number, show_seconds
from quire.bench.online.run import OK
from quire.bench.stats import SHARES, Report

LATENCY_ROWS = (
    ("ttft_s", "Time to first token"),
    ("tpot_s", "Time per output token"),
    ("itl_s", "Between pieces"),
    ("pause_s", "Longest pause of a request"),
    ("e2e_s", "End to end"),
)

STYLE = """
:root { color-scheme: light dark; --page: #f7f7f5; --card: #ffffff; --ink: #1b1b1a; --soft: #5d5c58; --line: #e2e1dc;
  --a: #2a6fc9; --b: #c8551b; --bad: #b3261e; --good: #1c7c3c; }
@media (prefers-color-scheme: dark) { :root { --page: #161615; --card: #201f1e; --ink: #f0efec; --soft: #a9a8a2;
  --line: #383734; --a: #6aa5f0; --b: #ee8a52; --bad: #f28b82; --good: #6fca8c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 3rem; max-width: 76rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.45rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1rem; margin: 0 0 .5rem; }
p { margin: .25rem 0; } .soft { color: var(--soft); overflow-wrap: anywhere; } .warn { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .75rem; margin: 1.25rem 0; }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .9rem 1rem; }
.tile b { display: block; font-size: 1.5rem; font-weight: 600; line-height: 1.25; }
.cards { display: grid; gap: .75rem; margin-top: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); }
.card { min-width: 0; } .wide { grid-column: 1 / -1; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .6rem; border-top: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } thead th { border-top: 0; }
th:first-child, td:first-child { text-align: left; padding-left: 0; } td.text { text-align: left; white-space: normal; }
svg { display: block; width: 100%; height: auto; font-size: 12.5px; } 
svg text { fill: var(--soft); paint-order: stroke; stroke: var(--card); stroke-width: 4px; stroke-linejoin: round; }
.grid { stroke: var(--line); } .axis, .tick { stroke: var(--soft); }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.line.a { stroke: var(--a); } .line.b { stroke: var(--b); }
.area.a { fill: var(--a); opacity: .14; } .dot { stroke: var(--card); stroke-width: 1.5; }
.dot.a { fill: var(--a); } .dot.b { fill: var(--b); } .small { stroke: none; opacity: .75; }
.cross { stroke: var(--bad); stroke-width: 1.6; fill: none; } .target { stroke: var(--soft); stroke-dasharray: 4 4; }
.column { fill: transparent; } .column:hover { fill: var(--soft); opacity: .18; }
.key::before { content: ""; display: inline-block; width: 1.1em; height: .25em; border-radius: 2px; margin-right: .5em;
  vertical-align: middle; } .key.a::before { background: var(--a); } .key.b::before { background: var(--b); }
.worse { color: var(--bad); font-weight: 600; } .better { color: var(--good); font-weight: 600; }
"""


def render_run(report: Report) -> str:
    title = f"{report['model']} under load"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(describe_work(report["work"]))} · {escape(report["url"])}</p>',
        *(f'<p class="warn">{escape(text)}</p>' for text in warnings(report)),
        tile_row(_run_tiles(report)),
        '<div class="cards">',
        *_run_plots(report),
        card("Latency", figure_table(("", *SHARES), _latency_rows(report)), wide=True),
        card("Traffic", figure_table(("", ""), _traffic_rows(report)), wide=True),
        *_failure_card(report),
        "</div>",
    ]
    return whole_page(title, body)


def render_comparison(a: Report, b: Report, comparison: Report) -> str:
    """Return the page for two runs of `quire bench online` and the result of `compare_runs`."""
    title = f"{a['model']} and {b['model']}" if a["model"] != b["model"] else f"{a['model']}: two runs"
    verdict = "B is not worse than A." if comparison["pass"] else "B is worse than A."
    runs = [Line("A", "a", ()), Line("B", "b", ())]
    rows = [
        f'<p class="key {line.style}">{line.label}: {escape(describe_work(run["work"]))} · {escape(run["url"])}</p>'
        for line, run in zip(runs, (a, b), strict=True)
    ]
    how = (
        f"Tolerance {comparison['tolerance']:.0%}; intervals hold {comparison['confidence']:.0%} of a bootstrap"
        f"{', request by request, as both did the same work' if comparison['same_work'] else ''}."
    )
    style = "better" if comparison["pass"] else "worse"
    body = [
        f"<h1>{escape(title)}</h1>",
        *rows,
        f'<p><b class="{style}">{verdict}</b> <span class="soft">{escape(how)}</span></p>',
        *(f'<p class="warn">{escape(note)}</p>' for note in comparison["notes"]),
        '<div class="cards">',
        *(
            card(
                label,
                cdf_plot(
                    label,
                    [Line("A", "a", latencies(a, name)), Line("B", "b", latencies(b, name))],
                    a["targets"].get(name),
                ),
            )
            for name, label in LATENCY_ROWS[:2]
        ),
        *(
            card(
                label,
                course_plot(
                    label,
                    unit,
                    [a["timeline"]["bin_s"], b["timeline"]["bin_s"]],
                    [Line("A", "a", a["timeline"][name]), Line("B", "b", b["timeline"][name])],
                ),
            )
            for name, label, unit in (
                ("in_flight", "Requests in flight", "requests"),
                ("output_tps", "Output tokens per second", "tok/s"),
            )
        ),
        card("Figures", _comparison_table(comparison["figures"]), wide=True),
        "</div>",
    ]
    return whole_page(title, body)


def latencies(report: Report, name: str) -> list[float]:
    return [entry[name] for entry in report["requests"] if entry[name] is not None]


def describe_work(work: Report) -> str:
    """Describe the work of a run in one line."""
    parts = [f"{work['requests']:,} requests"]
    if work.get("trace"):
        parts.append(f"arrivals of {work['trace']}")
        for name, what in (("scale_time", "time"), ("scale_len", "lengths")):
            if work[name] != 1:
                parts.append(f"{what} × {work[name]:g}")
    else:
        parts.append(f"{work['rate']:g} a second (Poisson)")
        parts.append(f"prompts of {work['prompts']}" if work.get("prompts") else f"{work['input_len']} tokens in")
        parts.append(f"{work['output_len']} out")
    return " · ".join([*parts, f"seed {work['seed']}"])


def warnings(report: Report) -> list[str]:
    """Return conditions of the run that make its figures misleading."""
    client, found = report["client"], []
    if client["held_back"]:
        held, limit = client["held_back"], client["max_open"]
        found.append(f"{held} requests waited for one of {limit} connections: these arrivals were not open-loop.")
    elif report["ttft_s"] and client["lag_s"]["p99"] > max(0.01, report["ttft_s"]["p50"] / 10):
        found.append(f"The client sent late (p99 {show_seconds(client['lag_s']['p99'])}): the client was overloaded.")
    if report["cached_tokens"] and not report["work"].get("shares_prefixes"):
        share = report["cached_tokens"] / max(report["prompt_tokens"], 1)
        found.append(
            f"{share:.0%} of the prompts came from the server's cache, left there by an earlier run with this "
            "seed: use another seed, or restart the server."
        )
    if report["without_usage"]:
        found.append(f"{report['without_usage']} answers came without a token count; each piece is taken for a token.")
    if report["short_answers"]:
        found.append(f"{report['short_answers']} answers were shorter than their max_tokens.")
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Parts of the page


def _run_tiles(report: Report) -> list[tuple[str, str]]:
    first, per_token = report["ttft_s"] or {}, report["tpot_s"] or {}
    tiles = [
        ("answered", f"{report['answered']:,} of {report['answered'] + report['failed']:,}"),
        ("TTFT p50", show_seconds(first["p50"]) if first else "–"),
        ("TTFT p99", show_seconds(first["p99"]) if first else "–"),
        ("TPOT p50", show_seconds(per_token["p50"]) if per_token else "–"),
        ("output tokens per second", show_number(report["output_tps"])),
    ]
    if any(report["targets"].values()):
        tiles.append((f"good requests: {_targets(report)}", f"{report['goodput']['share']:.1%}"))
    return tiles


def _targets(report: Report) -> str:
    names = (("TTFT", report["targets"]["ttft_s"]), ("TPOT", report["targets"]["tpot_s"]))
    return ", ".join(f"{name} ≤ {show_seconds(value)}" for name, value in names if value is not None)


def _run_plots(report: Report) -> Iterable[str]:
    timeline = report["timeline"]
    for name, label in LATENCY_ROWS[:2]:
        plot = cdf_plot(label, [Line("", "a", latencies(report, name))], report["targets"][name])
        yield card(f"{label}, share of requests", plot)
    for name, label, unit in (
        ("in_flight", "Requests in flight", "requests in flight"),
        ("output_tps", "Output tokens per second", "tok/s"),
    ):
        yield card(label, course_plot(label, unit, [timeline["bin_s"]], [Line("", "a", timeline[name])]))
    dots = [(entry["due_s"], entry["ttft_s"]) for entry in report["requests"] if entry["ttft_s"] is not None]
    failed = [entry["due_s"] for entry in report["requests"] if entry["outcome"] != OK]
    label = "Time to first token by arrival" + (" (× failed)" if failed else "")
    yield card(label, dots_plot("Time to first token", dots, failed))
    ends = [(entry["due_s"], entry["e2e_s"]) for entry in report["requests"] if entry["e2e_s"] is not None]
    yield card("End to end by arrival", dots_plot("End to end", ends, failed))


def _latency_rows(report: Report) -> list[tuple[str, ...]]:
    rows = [(label, report[name]) for name, label in LATENCY_ROWS] + [("Client lag", report["client"]["lag_s"])]
    return [(label, *(show_seconds(values[share]) for share in SHARES)) for label, values in rows if values]


def _traffic_rows(report: Report) -> list[tuple[str, str]]:
    rates, client, goodput = report["rates"], report["client"], report["goodput"]
    rows = [
        ("Requests per second: offered", _rate(rates["offered_rps"])),
        ("Requests per second: sent", _rate(rates["sent_rps"])),
        ("Requests per second: answered", _rate(rates["answered_rps"])),
        ("Requests per second: good", f"{_rate(goodput['rps'])} ({goodput['share']:.1%} of all)"),
        ("Prompt tokens (from the cache)", f"{report['prompt_tokens']:,} ({report['cached_tokens']:,})"),
        ("Output tokens", f"{report['output_tokens']:,}"),
        ("Prompt and output tokens per second", show_number(report["total_tps"])),
        ("Connections at once (limit)", f"{client['most_open']:,} ({client['max_open']:,})"),
        ("Wall time", show_seconds(report["wall_s"])),
    ]
    return rows


def _rate(value: float | None) -> str:
    return "all at once" if value is None else f"{value:.3g}"


def _failure_card(report: Report) -> Iterable[str]:
    if report["failures"]:
        rows = "".join(
            f"<tr><td>{escape(failure['outcome'])}</td><td>{failure['count']:,}</td>"
            f'<td class="text">{escape(failure["example"])}</td></tr>'
            for failure in report["failures"]
        )
        head = '<thead><tr><th>outcome</th><th>requests</th><th style="text-align:left">for example</th></tr></thead>'
        yield card("Failures", f"<table>{head}<tbody>{rows}</tbody></table>", wide=True)


def escape(text: str) -> str:
    """Escape text for content and attributes, with a space for each character that XML forbids."""
    return html.escape("".join(char if char.isprintable() else " " for char in text))


def _comparison_table(figures: Sequence[Report]) -> str:
    rows = []
    for figure in figures:
        cells = [show_figure(figure, figure["a"]), show_figure(figure, figure["b"]), show_ratio(figure["ratio"])]
        cells.append(show_interval(figure))
        verdict = figure["verdict"]
        row = "".join(f"<td>{escape(cell)}</td>" for cell in (figure["name"], *cells))
        rows.append(f'<tr>{row}<td class="{verdict.replace(" ", "-")}">{verdict}</td></tr>')
    head = "".join(f"<th>{heading}</th>" for heading in ("", "A", "B", "B / A", "interval", "verdict"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def show_figure(figure: Report, value: float) -> str:
    return {"seconds": show_seconds, "share": "{:.1%}".format, "rate": show_number}[figure["unit"]](value)


def show_ratio(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"


def show_interval(figure: Report) -> str:
    return "–" if figure["low"] is None else f"{figure['low']:.2f} to {figure['high']:.2f}"


def tile_row(tiles: Iterable[tuple[str, str]]) -> str:
    shown = (
        f'<div class="tile"><b>{escape(value)}</b><span class="soft">{escape(name)}</span></div>'
        for name, value in tiles
    )
    return f'<div class="tiles">{"".join(shown)}</div>'


def card(title: str, content: str, wide: bool = False) -> str:
    return f'<section class="card{" wide" if wide else ""}"><h2>{escape(title)}</h2>{content}</section>'


def figure_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    head = f"<thead><tr>{head}</tr></thead>" if any(headings) else ""
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{head}<tbody>{lines}</tbody></table>"


def whole_page(title: str, body: Iterable[str]) -> str:
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"/><title>{escape(title)}</title>
<meta http-equiv="Content-Security-Policy" content="{policy}"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<style>{STYLE}</style></head>
<body>
{"".join(body)}
</body></html>
"""
