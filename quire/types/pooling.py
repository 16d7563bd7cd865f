"""How the hidden states of a prompt become one vector, and who said so."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from quire.types.errors import QuireError

POOLINGS = ("mean", "last")


@dataclass(frozen=True, slots=True)
class PoolingRule:
    kind: str  # mean, last, or what a model asks for and the engine can't do
    normalize: bool  # to the length 1
    source: str  # model (its own files say so), server (--pooling), request, or assumed
    problem: str = ""  # why the engine can't do what the model asks for

    def scaled(self, vector: list[float]) -> list[float]:
        if not self.normalize:
            return vector
        length = math.sqrt(math.fsum(value * value for value in vector)) or 1.0
        return [value / length for value in vector]


# A causal model's last token is the only one that has seen the whole text; engines of the field assume the same.
ASSUMED = PoolingRule("last", True, "assumed")


def choose_pooling(
    model: PoolingRule | None, configured: str | None, asked: str | None, normalize: bool | None = None
) -> PoolingRule:
    """The rule in force: what the request names, else the server's setting, else the model's own files, else `ASSUMED`.
    Whether vectors are normalised is the model's to say as well, unless the request does."""
    rule = model or ASSUMED
    if asked is not None:
        rule = replace(rule, kind=asked, source="request", problem="")
    elif configured is not None:
        rule = replace(rule, kind=configured, source="server", problem="")
    if rule.problem:
        hint = f"Name a pooling that is: {' or '.join(POOLINGS)}."
        raise QuireError("unsupported_pooling", rule.problem, hint, "pooling")
    return rule if normalize is None else replace(rule, normalize=normalize)
