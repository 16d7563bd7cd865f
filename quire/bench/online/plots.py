"""Plots of the online benchmark as inline SVG: distributions, and values over time.

`quire.bench.online.report` embeds them in a page whose style sheet sets the colours of the runs (classes `a` and `b`)
for light and dark mode. They use no scripts and no external resources; tooltips show the figures. Other benchmarks draw
their plots with the parts at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from quire.bench.stats import percentile

WIDTH, HEIGHT = 520, 290
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 14, 44
MAX_POINTS = 400  # per line
MAX_DOTS = 1500
MARKED = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Line:
    """Values of one run; `style` is `a` or `b`."""

    label: str
    style: str
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to coordinates between `start` and `stop`, linearly or logarithmically."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return self.start + (self.stop - self.start) * (value - low) / (high - low)

    def ticks(self) -> list[float]:
        if not self.log:
            step = _nice_step((self.high - self.low) / 6)
            first = math.ceil(self.low / step - 1e-9)
            return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for steps in ((1, 2, 5), (1, 3), (1,)):
            ticks = [step * 10.0**power for power in decades for step in steps]
            shown = [tick for tick in ticks if self.low * 0.999 <= tick <= self.high * 1.001]
            if len(shown) <= 6:
                break
        return shown


def _nice_step(rough: float) -> float:
    unit = 10.0 ** math.floor(math.log10(rough))
    return next((factor * unit for factor in (1, 2, 5) if factor * unit >= rough * 0.999), 10 * unit)


def _latency_axis(values: Sequence[float]) -> Axis:
    """Return an axis for latencies: logarithmic if the largest is more than 12 times the smallest."""
    low, high = min(values), max(values)
    if low > 0 and high / low > 12:
        return Axis(low / 1.15, high * 1.15, LEFT, WIDTH - RIGHT, log=True)
    return Axis(0.0, high * 1.06 or 1.0, LEFT, WIDTH - RIGHT)


def show_seconds(value: float) -> str:
    """Format seconds with three digits in s, ms or µs."""
    if value == 0:
        return "0"
    unit, factor = _unit_of(value)
    return f"{value * factor:#.3g}".rstrip(".") + f" {unit}" if value < 100 else f"{value:,.0f} s"


def _show_tick(value: float) -> str:
    unit, factor = _unit_of(value)
    return f"{value * factor:.4g} {unit}" if value else "0"


def _unit_of(value: float) -> tuple[str, float]:
    if value >= 1:
        return "s", 1
    return ("ms", 1e3) if value >= 0.001 else ("µs", 1e6)


def show_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or float(value).is_integer() else f"{value:.3g}"


# ---------------------------------------------------------------------------------------------------------------------
# Plots


def cdf_plot(name: str, lines: Sequence[Line], target: float | None = None) -> str:
    """Plot the cumulative distribution of latencies, with percentiles and the target marked."""
    lines = [line for line in lines if line.values]
    if not lines:
        return _empty(name)
    everything = [value for line in lines for value in line.values]
    x = _latency_axis(everything if target is None else [*everything, target])
    y = Axis(0.0, 1.0, HEIGHT - BOTTOM, TOP)
    parts = [draw_grid(x, y, _show_tick, lambda share: f"{share:.0%}", name)]
    if target is not None and target > 0:
        place = x(target)
        parts.append(f'<line class="target" x1="{place:.1f}" x2="{place:.1f}" y1="{y(1):.1f}" y2="{y(0):.1f}"/>')
        end = place > WIDTH * 0.7
        parts.append(draw_text(place + (-5 if end else 5), y(0.06), f"target {show_seconds(target)}", end=end))
    for line in lines:
        ordered = sorted(line.values)
        count = min(len(ordered), MAX_POINTS)
        places = [round((index + 1) * len(ordered) / count) for index in range(count)]
        path = "".join(f"H{x(ordered[place - 1]):.1f}V{y(place / len(ordered)):.1f}" for place in places)
        parts.append(f'<path class="line {line.style}" d="M{x(ordered[0]):.1f} {y(0):.1f}{path}"/>')
        for mark, share in MARKED.items():
            value = percentile(ordered, share)
            tip = f"{line.label}: {mark} {show_seconds(value)}" if line.label else f"{mark} {show_seconds(value)}"
            parts.append(draw_dot(x(value), y(share), line.style, tip))
            if len(lines) == 1:
                end = x(value) > WIDTH * 0.72
                parts.append(draw_text(x(value) + (-9 if end else 9), y(share) + (-3 if end else 13), tip, end=end))
    return draw_svg(f"{name}: share of requests that took at most this long", parts)


def course_plot(name: str, unit: str, bin_widths: Sequence[float], lines: Sequence[Line]) -> str:
    """Plot binned values over the time of the run; `bin_widths` has the seconds per bin of each line."""
    spans = [width * len(line.values) for width, line in zip(bin_widths, lines, strict=True)]
    most = max(max(line.values, default=0.0) for line in lines)
    x = Axis(0.0, max(spans), LEFT, WIDTH - RIGHT)
    y = Axis(0.0, most * 1.08 or 1.0, HEIGHT - BOTTOM, TOP)
    parts = [draw_grid(x, y, _show_plain, show_number, "seconds after the first arrival")]
    for width, line in zip(bin_widths, lines, strict=True):
        path = "".join(
            f"{'L' if index else 'M'}{x(index * width):.1f} {y(value):.1f}H{x((index + 1) * width):.1f}"
            for index, value in enumerate(line.values)
        )
        if len(lines) == 1:
            area = f"{path}V{y(0):.1f}H{x(0):.1f}Z"
            parts.append(f'<path class="area {line.style}" d="{area}"/>')
        parts.append(f'<path class="line {line.style}" d="{path}"/>')
        if len(lines) == 1:
            parts += [
                _column(x, index * width, width, f"{show_number(value)} {unit}")
                for index, value in enumerate(line.values)
            ]
    return draw_svg(f"{name} over the time of the run, {unit}", parts)


def dots_plot(name: str, dots: Sequence[tuple[float, float]], failed: Sequence[float]) -> str:
    """Plot a dot for each answered request by its due time; crosses at the top mark failed requests."""
    if not dots:
        return _empty(name)
    times = [value for _, value in dots]
    latency = _latency_axis(times)
    y = Axis(latency.low, latency.high, HEIGHT - BOTTOM, TOP + (14 if failed else 0), latency.log)
    x = Axis(0.0, max([at for at, _ in dots] + [*failed, 1e-3]) * 1.02, LEFT, WIDTH - RIGHT)
    parts = [draw_grid(x, y, _show_plain, _show_tick, "seconds after the first arrival")]
    stride = -(-len(dots) // MAX_DOTS)
    for at, value in dots[::stride]:
        parts.append(draw_dot(x(at), y(value), "a small", f"due at {at:.2f} s: {show_seconds(value)}"))
    for at in failed[:: -(-len(failed) // MAX_DOTS) or 1]:
        left, top = x(at) - 3.5, TOP - 2
        path = f"M{left:.1f} {top}l7 7m0 -7l-7 7"
        parts.append(f'<path class="cross" d="{path}"><title>due at {at:.2f} s: failed</title></path>')
    return draw_svg(f"{name} by time of arrival", parts)


# ---------------------------------------------------------------------------------------------------------------------
# Parts


def _show_plain(value: float) -> str:
    return f"{value:g}"


def draw_grid(x: Axis, y: Axis, show_x: Callable[[float], str], show_y: Callable[[float], str], below: str) -> str:
    parts = []
    for tick in y.ticks():
        place = y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>')
        parts.append(draw_text(LEFT - 8, place + 4, show_y(round(tick, 9)), end=True))
    for tick in x.ticks():
        place = x(tick)
        parts.append(f'<line class="tick" x1="{place:.1f}" x2="{place:.1f}" y1="{y.start}" y2="{y.start + 4}"/>')
        parts.append(draw_text(place, y.start + 17, show_x(round(tick, 9)), middle=True))
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y.start}" y2="{y.start}"/>')
    parts.append(draw_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, below, middle=True))
    return "".join(parts)


def draw_text(x: float, y: float, text: str, *, end: bool = False, middle: bool = False) -> str:
    anchor = ' text-anchor="end"' if end else ' text-anchor="middle"' if middle else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{anchor}>{escape(text)}</text>'


def draw_dot(x: float, y: float, style: str, tip: str) -> str:
    radius = 2.8 if "small" in style else 4
    return f'<circle class="dot {style}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"><title>{escape(tip)}</title></circle>'


def _column(x: Axis, begin: float, width: float, tip: str) -> str:
    """Return an invisible column whose tooltip shows the value of its bin."""
    left, right = x(begin), x(begin + width)
    place = f'x="{left:.1f}" y="{TOP}" width="{right - left:.2f}" height="{HEIGHT - TOP - BOTTOM}"'
    return f'<rect class="column" {place}><title>{begin:.2f} to {begin + width:.2f} s: {escape(tip)}</title></rect>'


def draw_svg(label: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _empty(name: str) -> str:
    return draw_svg(
        f"{name}: nothing to show", [draw_text(WIDTH / 2, HEIGHT / 2, "no request has such a figure", middle=True)]
    )
