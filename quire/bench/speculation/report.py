"""The speculation benchmark's HTML page: ratios of each class with their bars, ratios of each turn, and acceptance.

`quire bench speculation --html` writes it, in the style of the online benchmark's pages.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    draw_text,
)
from quire.bench.online.report import card, escape, figure_table, tile_row, whole_page
from quire.bench.speculation.run import accepted_shares
from quire.bench.speculation.tasks import CLASSES
from quire.bench.stats import Report

STYLES = ("a", "b")  # of the temperatures, in turn


def render_speculation(report: Report) -> str:
    title = f"{report['model']}: speculation {report['speculate']}"
    missed = [bar["name"] for bar in report["bars"] if not bar["pass"]]
    results = report["results"]
    tiles = [
        ("answers compared", f"{sum(r['prompts'] for r in results):,}"),
        ("answers that differ", f"{sum(r['different_answers'] for r in results):,}"),
        ("bars met", f"{len(report['bars']) - len(missed)} of {len(report['bars'])}"),
        ("instruction set", report["isa"] or "none"),
    ]
    body = [
        f"<h1>{escape(title)}</h1>",
        '<p class="soft">Decoding with and without speculation, turn about in one run; the same tokens.</p>',
        *(f'<p class="warn">missed: {escape(name)}</p>' for name in missed),
        *(
            f'<p class="key {style}">temperature {temperature:g}</p>'
            for style, temperature in zip(STYLES, _temperatures(report), strict=False)
        ),
        tile_row(tiles),
        '<div class="cards">',
        card("Speed-up by class", ratio_plot(report)),
        card("Speed-up of each turn", turns_plot(report)),
        *(
            card(f"Accepted by position: {name}", acceptance_plot(name, rates))
            for name, rates in _acceptance(report).items()
        ),
        card(
            "Decoding, tokens per second and per step",
            figure_table(HEADINGS, [row_of(result) for result in results]),
            wide=True,
        ),
        "</div>",
    ]
    return whole_page(title, body)


HEADINGS = ("class", "off", "on", "ratio", "median", "whole", "a step", "accepted")


def row_of(result: Report) -> tuple[str, ...]:
    """Return a line of the table of figures, which the terminal shows too."""
    return (
        f"{result['class']}, {result['temperature']:g}",
        f"{result['off_tps']:.1f}",
        f"{result['on_tps']:.1f}",
        f"{result['ratio']:.3f}",
        f"{result['median_ratio']:.3f}",
        f"{result['whole_ratio']:.3f}",
        f"{result['tokens_per_step']:.2f}",
        f"{result['accepted']} of {result['accepted'] + result['rejected']}",
    )


def ratio_plot(report: Report) -> str:
    """A column for each class and temperature, with the class's bar across."""
    names, x, y = _axes(report, [result["ratio"] for result in report["results"]])
    parts = [draw_grid(x, y, lambda value: "", lambda value: f"{value:g}×", "")]
    parts += [draw_text(x(place), y.start + 17, name, middle=True) for place, name in enumerate(names)]
    temperatures = _temperatures(report)
    width = (x(1) - x(0)) * 0.7 / len(temperatures)
    for result in report["results"]:
        place = temperatures.index(result["temperature"])
        left = x(names.index(result["class"])) + (place - len(temperatures) / 2) * width
        top = y(result["ratio"])
        tip = f"{result['class']}, temperature {result['temperature']:g}: {result['ratio']:.2f}×"
        parts.append(
            f'<rect class="dot {_style(place)}" x="{left:.1f}" y="{top:.1f}" width="{width - 1:.1f}" '
            f'height="{y(0) - top:.1f}"><title>{escape(tip)}</title></rect>'
        )
    parts += [_line(x(-0.5), x(len(names) - 0.5), y(1))]
    for place, name in enumerate(names):
        bars = CLASSES[name].bars
        least = bars.get(report["isa"], bars.get("any"))
        if least is not None:
            parts.append(_line(x(place - 0.42), x(place + 0.42), y(least)))
    return draw_svg("Speed-up by class of work; dashed lines are the bars", parts)


def turns_plot(report: Report) -> str:
    """A dot for each turn of each class."""
    names, x, y = _axes(report, [ratio for result in report["results"] for ratio in result["turns"]])
    parts = [draw_grid(x, y, lambda value: "", lambda value: f"{value:g}×", "")]
    parts += [draw_text(x(place), y.start + 17, name, middle=True) for place, name in enumerate(names)]
    parts.append(_line(x(-0.5), x(len(names) - 0.5), y(1)))
    for result in report["results"]:
        style = _style(_temperatures(report).index(result["temperature"]))
        for place, ratio in enumerate(result["turns"]):
            spread = (place % 9 - 4) * 0.08
            tip = f"{result['class']}, temperature {result['temperature']:g}, turn {place + 1}: {ratio:.2f}×"
            parts.append(draw_dot(x(names.index(result["class"]) + spread), y(ratio), f"{style} small", tip))
    return draw_svg("Speed-up of each turn by class of work", parts)


def acceptance_plot(name: str, rates: Sequence[float]) -> str:
    """Share of the verified guesses at each position that were accepted."""
    x = Axis(0.0, len(rates) + 1.0, LEFT, WIDTH - RIGHT)
    y = Axis(0.0, 1.0, HEIGHT - BOTTOM, TOP)
    parts = [draw_grid(x, y, _whole, lambda share: f"{share:.0%}", "position in the draft")]
    points = [(x(place), y(rate)) for place, rate in enumerate(rates, start=1)]
    path = "L".join(f"{left:.1f} {top:.1f}" for left, top in points)
    parts.append(f'<path class="line a" d="M{path}"/>')
    for place, (left, top) in enumerate(points, start=1):
        parts.append(draw_dot(left, top, "a", f"position {place}: {rates[place - 1]:.0%} accepted"))
    return draw_svg(f"Share of verified guesses of {name} that were accepted, by position", parts)


def _acceptance(report: Report) -> dict[str, list[float]]:
    found = {}
    for setting, stats in report["proposers"].items():
        for name, rates in accepted_shares(stats).items():
            found[name if setting == report["speculate"] else f"{name} ({setting})"] = rates
    return found


def _axes(report: Report, ratios: Sequence[float]) -> tuple[list[str], Axis, Axis]:
    names = list(dict.fromkeys(result["class"] for result in report["results"]))
    x = Axis(-0.6, len(names) - 0.4, LEFT, WIDTH - RIGHT)
    return names, x, Axis(0.0, max([1.0, *ratios]) * 1.08, HEIGHT - BOTTOM, TOP)


def _temperatures(report: Report) -> list[float]:
    return list(dict.fromkeys(result["temperature"] for result in report["results"]))


def _style(place: int) -> str:
    return STYLES[place % len(STYLES)]


def _whole(value: float) -> str:
    return f"{value:g}" if float(value).is_integer() else ""


def _line(left: float, right: float, height: float) -> str:
    return f'<line class="target" x1="{left:.1f}" x2="{right:.1f}" y1="{height:.1f}" y2="{height:.1f}"/>'
