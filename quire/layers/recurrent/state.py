"""Recurrent layers' share of a step, and the cache spec of their state. The kinds are in files of their own.

A model makes one `RecurrentLayersPlan` at the start of a step; every recurrent layer then works from it.
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
    states: tuple[Tensor, ...]  # of each layer in turn: [slots, slot_elements] float32
    kernel: Any  # what the chosen kernels want to know of the step


def plan_recurrent(step: Step, spec: CacheSpec, cache: Tensor, ops: Ops) -> RecurrentLayersPlan:
    """`cache` is the group's whole memory, [layers, slots, slot_elements]."""
    inputs = step.groups[spec.group]
    assert isinstance(inputs, StateInputs)
    return RecurrentLayersPlan(cache.unbind(0), ops.plan_recurrent(inputs.slots, step.positions, step.counts))


def state_spec(group: str, layers: tuple[int, ...], slot_elements: int, page_tokens: int) -> CacheSpec:
    """The state of these layers, always in float32: it is a sum over all tokens so far."""
    every = max(SNAPSHOT_TOKENS // page_tokens, 1) * page_tokens  # a snapshot belongs to a page's end
    return CacheSpec(
        group, "state", layers, (slot_elements,), "float32", page_tokens=page_tokens, snapshot_tokens=every
    )
