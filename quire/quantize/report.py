"""What a quantized model lost against its source: perplexity, KL divergence and how often the most likely token is the
same, as a table and as a plot.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from quire.files.source import ModelFiles
from quire.models.loading.loader import load_model
from quire.runtime.reading import CPU, PAGE, next_token_scores


@dataclass(slots=True)
class Loss:
    """Figures over all tokens of a text."""

    perplexity: float
    source_perplexity: float
    kl: float
    same_top: float
    tokens: int


@dataclass(slots=True)
class Result:
    """One quantized model."""

    title: str  # type and method
    num_bytes: int
    bits: float  # a weight, of the tensors that may be quantized
    loss: Loss
    by_layer: list[float] = field(default_factory=list)  # KL with one layer of the result in the source

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def load_float(files: ModelFiles) -> Any:
    """Returns a model with its weights decoded to float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that its weights are decoded is what is asked for
        how: dict[str, Any] = {"dtype": "float32", "kernels": "torch"}
        return load_model(files, device=CPU, max_model_len=None, page_tokens=PAGE, **how).model


def load_served(files: ModelFiles) -> Any:
    """Returns a model as `quire serve` would run it."""
    return load_model(files, dtype="auto", device=CPU, max_model_len=None, page_tokens=PAGE).model


class Scores:
    """The source's scores of a text, computed once for all results."""

    def __init__(self, model: Any, stretches: Sequence[Sequence[int]]):
        self.stretches = stretches
        self.scores = [[scores.half() for scores, _ in next_token_scores(model, tokens)] for tokens in stretches]

    def compare(self, model: Any, on_stretch: Callable[[int], None] = lambda done: None) -> Loss:
        sums = {"source": 0.0, "result": 0.0, "kl": 0.0, "same": 0.0}
        count = 0
        for done, (tokens, kept) in enumerate(zip(self.stretches, self.scores, strict=True), 1):
            for exact, (got, targets) in zip(kept, next_token_scores(model, tokens), strict=True):
                want, rows = exact.float().log_softmax(-1), torch.arange(len(targets))
                sums["source"] -= want[rows, targets].sum().item()
                sums["result"] -= got[rows, targets].sum().item()
                sums["kl"] += (want.exp() * (want - got)).sum().item()
                sums["same"] += (want.argmax(1) == got.argmax(1)).sum().item()
                count += len(targets)
            on_stretch(done)
        result, source = math.exp(sums["result"] / count), math.exp(sums["source"] / count)
        return Loss(result, source, sums["kl"] / count, sums["same"] / count, count)


def by_layer(source: Any, result: Any, scores: Scores) -> list[float]:
    """Returns the KL divergence of the source with each one of its layers taken from the result."""
    layers = [name for name in dict(source.named_modules()) if _is_layer(name)]
    mine, its = dict(source.named_modules()), dict(result.named_modules())
    found = []
    for name in layers:
        kept: list[tuple[Tensor, Tensor]] = []
        for one, other in zip(mine[name].parameters(), its[name].parameters(), strict=True):
            kept.append((one, one.data.clone()))
            one.data.copy_(other.data)
        found.append(scores.compare(source).kl)
        for parameter, old in kept:
            parameter.data.copy_(old)
    return found


def _is_layer(name: str) -> bool:
    stem, _, number = name.rpartition(".")
    return (
        number.isdigit()
        and stem.rpartition(".")[2] in ("layers", "blocks")
        and not any(part.isdigit() for part in stem.split("."))
    )


def table_rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Returns the report as rows of text, the first one with the titles."""
    rows: list[tuple[str, ...]] = [("type", "size", "bits", "perplexity", "KL", "same top token")]
    for result in results:
        loss = result.loss
        size = f"{result.num_bytes / 1e6:.1f} MB"
        figures = (f"{loss.perplexity:.3f}", f"{loss.kl:.4f}", f"{loss.same_top:.1%}")
        rows.append((result.title, size, f"{result.bits:.2f}", *figures))
    return rows


def as_markdown(results: Sequence[Result]) -> str:
    head, *rows = table_rows(results)
    lines = [head, tuple("---" if place == 0 else "---:" for place in range(len(head))), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
