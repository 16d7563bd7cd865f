"""How the hidden states of a prompt are pooled into one vector, and where that rule comes from."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from quire.types.errors import QuireError

POOLINGS = ("mean", "last")


@dataclass(frozen=True, slots=True)
class PoolingRule:
    """How vectors are pooled and normalised, and where that was decided."""

    kind: str  # mean, last, or a method of the model that the engine does not support
    normalize: bool  # scale vectors to length 1
    source: str  # model (its files), server (--pooling), request, or assumed
    problem: str = ""  # why the model's own method is not supported

    def scaled(self, vector: list[float]) -> list[float]:
        if not self.normalize:
            return vector
        length = math.sqrt(math.fsum(value * value for value in vector)) or 1.0
        return [value / length for value in vector]


# Only the last token of a causal model attends to the whole text; other engines assume the same.
ASSUMED = PoolingRule("last", True, "assumed")


def choose_pooling(
    model: PoolingRule | None, configured: str | None, asked: str | None, normalize: bool | None = None
) -> PoolingRule:
    """Return the rule in force: the request's, else the server's, else the model's, else `ASSUMED`.

    Normalisation follows the model's rule unless the request sets it. Raises if the model's method is not supported.
    """
    rule = model or ASSUMED
    if asked is not None:
        rule = replace(rule, kind=asked, source="request", problem="")
    elif configured is not None:
        rule = replace(rule, kind=configured, source="server", problem="")
    if rule.problem:
        hint = f"Name a pooling that is: {' or '.join(POOLINGS)}."
        raise QuireError("unsupported_pooling", rule.problem, hint, "pooling")
    return rule if normalize is None else replace(rule, normalize=normalize)
