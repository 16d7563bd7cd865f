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
    x = Axis(0, max(sizes) * 1.25, LEFT, WIDTH - RIGHT)
    y = Axis(min(losses) / 2, max(losses) * 2, HEIGHT - BOTTOM, TOP, log=True)
    parts = [draw_grid(x, y, lambda v: f"{v:g}", lambda v: f"{v:g}", "megabytes")]
    for result, size, loss in zip(results, sizes, losses, strict=True):
        tip = f"{result.title}: {size:.1f} MB, KL {result.loss.kl:.4f}"
        parts.append(draw_dot(x(size), y(loss), "a", tip))
        parts.append(draw_text(x(size) + 7, y(loss) + 4, result.title))
    return draw_svg("KL divergence by size", parts)


def layer_plot(losses: Sequence[float]) -> str:
    x = Axis(0, max(1, len(losses)), LEFT, WIDTH - RIGHT)
    y = Axis(0, max([*losses, LEAST_KL]) * 1.1, HEIGHT - BOTTOM, TOP)
    parts = [draw_grid(x, y, lambda v: f"{v:g}", lambda v: f"{v:g}", "layer")]
    for layer, loss in enumerate(losses):
        parts.append(draw_dot(x(layer), y(loss), "a", f"layer {layer}: {loss:.5f}"))
    return draw_svg("KL divergence by layer", parts)
