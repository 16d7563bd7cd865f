"""What recurrent layers share: their plan of a step and the cache spec of their state. Each kind of layer is a file.

A model makes one `RecurrentLayersPlan` at the start of a step, which all recurrent layers use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.kernels.table import Ops
from quire.layers.step import StateInputs, Step
from quire.types import CacheSpec

SNAPSHOT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class RecurrentLayersPlan:
    """The inputs that all recurrent layers share in one step."""

    states: tuple[Tensor, ...]  # state of each layer in turn: [slots, slot_elements] float32
    kernel: Any  # the selected kernels' own plan of the step


def plan_recurrent(step: Step, spec: CacheSpec, cache: Tensor, ops: Ops) -> RecurrentLayersPlan:
    """Returns the plan of a step. cache [layers, slots, slot_elements]"""
    inputs = step.groups[spec.group]
    assert isinstance(inputs, StateInputs)
    return RecurrentLayersPlan(cache.unbind(0), ops.plan_recurrent(inputs.slots, step.positions, step.counts))


def state_spec(group: str, layers: tuple[int, ...], slot_elements: int, page_tokens: int) -> CacheSpec:
    """Returns the cache spec of these layers' state, in float32, because it accumulates over all tokens."""
    every = max(SNAPSHOT_TOKENS // page_tokens, 1) * page_tokens  # snapshots lie at the ends of pages
    return CacheSpec(
        group, "state", layers, (slot_elements,), "float32", page_tokens=page_tokens, snapshot_tokens=every
    )
