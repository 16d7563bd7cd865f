"""The report as a page: the table, bytes against KL divergence, and what each layer loses."""

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
from quire.bench.online.report import card, escape, figure_table, whole_page
from quire.quantize.report import Result, table_rows

LABEL_WIDTH, LABEL_HEIGHT = 74, 11
LEAST_KL = 1e-5  # drawn, on a logarithmic axis


def render(model: str, results: Sequence[Result]) -> str:
    head, *rows = table_rows(results)
    loss = results[0].loss
    title = f"{model}: quantized"
    what = f"Against {model} with a perplexity of {loss.source_perplexity:.3f}, on {loss.tokens:,} tokens."
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(what)}</p>',
        '<div class="cards">',
        card("Size and KL divergence", size_plot(results)),
        *(
            card(f"KL of single layers: {result.title}", layer_plot(result.by_layer))
            for result in results
            if result.by_layer
        ),
        card("All figures", figure_table(head, rows), wide=True),
        "</div>",
    ]
    return whole_page(title, body)


def size_plot(results: Sequence[Result]) -> str:
    """Draws a dot for each result: megabytes to the right, KL divergence upwards in powers of ten."""
    sizes = [result.num_bytes / 1e6 for result in results]
    losses = [max(LEAST_KL, result.loss.kl) for result in results]
    x = Axis(min(sizes) * 0.9, max(sizes) * 1.15, LEFT, WIDTH - RIGHT)
    y = Axis(min(losses) / 2, max(losses) * 2, HEIGHT - BOTTOM, TOP, log=True)
    parts = [draw_grid(x, y, lambda v: f"{v:g}", lambda v: f"{v:g}", "megabytes")]
    for result, size, loss in zip(results, sizes, losses, strict=True):
        tip = f"{result.title}: {size:.1f} MB, KL {result.loss.kl:.4f}"
        parts.append(draw_dot(x(size), y(loss), "a", tip))
    places = [(x(size), y(loss)) for size, loss in zip(sizes, losses, strict=True)]
    for (left, _), height, result in zip(places, spread_labels(places), results, strict=True):
        parts.append(draw_text(left + 7, height + 4, result.title))
    return draw_svg("KL divergence by size", parts)


def spread_labels(places: Sequence[tuple[float, float]]) -> list[float]:
    """Returns the height of each dot's label: its own, or as far below as keeps it clear of labels beside it."""
    heights: dict[int, float] = {}
    for index in sorted(range(len(places)), key=lambda index: places[index][1]):
        left, height = places[index]
        for other, taken in sorted(heights.items(), key=lambda item: item[1]):
            if abs(places[other][0] - left) < LABEL_WIDTH and abs(taken - height) < LABEL_HEIGHT:
                height = taken + LABEL_HEIGHT
        heights[index] = height
    return [heights[index] for index in range(len(places))]


def layer_plot(losses: Sequence[float]) -> str:
    x = Axis(0, max(1, len(losses)), LEFT, WIDTH - RIGHT)
    y = Axis(0, max([*losses, LEAST_KL]) * 1.1, HEIGHT - BOTTOM, TOP)
    parts = [draw_grid(x, y, lambda v: f"{v:g}", lambda v: f"{v:g}", "layer")]
    for layer, loss in enumerate(losses):
        parts.append(draw_dot(x(layer), y(loss), "a", f"layer {layer}: {loss:.5f}"))
    return draw_svg("KL divergence by layer", parts)
