"""Pipeline stages: which consecutive layers of a model a rank has. `Model.take_stage` drops the others.

A stage before the last returns the residual stream of all tokens, and the next one takes it as `Step.stream`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.types import CacheSpec, QuireError


@dataclass(frozen=True, slots=True)
class Stage:
    """One of `count` stages."""

    index: int
    count: int

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, num_layers: int, head: float = 0.0) -> range:
        """Returns the layers of this stage. `head`: the work of the output head, in layers; the last stage has it and
        gets fewer layers. Raises an error if there are more stages than layers."""
        if self.count > num_layers:
            what = f"{num_layers} layers can't be divided among {self.count} pipeline stages."
            raise QuireError("unsupported_split", what, "Use at most as many stages as layers.", param="pp")
        share = (num_layers + head) / self.count
        ends = [0]
        for stage in range(1, self.count):
            left = self.count - stage  # each of these stages has a layer, too
            ends.append(min(max(round(stage * share), ends[-1] + 1), num_layers - left))
        ends.append(num_layers)
        return range(ends[self.index], ends[self.index + 1])


WHOLE = Stage(0, 1)


def keep_layers(specs: Sequence[CacheSpec], kept: range) -> list[CacheSpec]:
    """Returns the cache groups of a stage. All stages have the same groups; one without layers here keeps nothing."""
    return [replace(spec, layers=tuple(layer for layer in spec.layers if layer in kept)) for spec in specs]
