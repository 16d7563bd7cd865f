"""Recurrent layers for the deterministic mode on CUDA: prompts go token by token through the kernel that decodes.

A scan over chunks takes its sums in another order, so there is none: a step runs as many waves as its longest row has
tokens, the n-th of them with every row's n-th token. A program of that kernel sees one head of one row, and what it
holds at a time follows from the model's shape alone. `docs/reliability.md` has the cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from quire.kernels.recurrent import DeltaWeights, MambaWeights, RecurrentShape
from quire.kernels.triton import recurrent_step
from quire.kernels.triton.recurrent import norm_groups
from quire.kernels.triton.recurrent_step import StepTuning
from quire.kernels.upload import upload

ALIGNED = 2  # indices: kernels are compiled for pointers that are multiples of 16 bytes
VALUE_BLOCK = 16  # rows of a matrix that a program holds at a time


@dataclass(frozen=True, slots=True)
class Waves:
    slots: Tensor  # [rows] int64
    positions: Tensor  # [tokens] int64
    waves: list[tuple[Tensor, Tensor]]  # rows and tokens of each, int64


def plan_recurrent(slots: Tensor, positions: Tensor, counts: list[int]) -> Waves:
    """As `recurrent.plan_recurrent`. A step of single tokens needs nothing from the host, so it can be captured."""
    if all(count == 1 for count in counts):
        everyone = torch.arange(len(counts), device=slots.device)
        return Waves(slots, positions, [(everyone, everyone)])
    rows, tokens, sizes = list_waves(counts)
    sent = upload({"waves": {"rows": rows, "tokens": tokens}}, slots.device)["waves"]
    waves, begin = [], 0
    for size in sizes:
        waves.append((sent["rows"][begin : begin + size], sent["tokens"][begin : begin + size]))
        begin += _aligned(size)
    return Waves(slots, positions, waves)


def list_waves(counts: list[int]) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Rows and tokens of all waves, each from an aligned place on, and how many each has."""
    numbers = np.array(counts, np.int64)
    firsts = np.cumsum(numbers) - numbers
    sizes = [int((numbers > wave).sum()) for wave in range(int(numbers.max(initial=0)))]
    rows, tokens = np.zeros((2, sum(map(_aligned, sizes))), np.int64)
    begin = 0
    for wave, size in enumerate(sizes):
        there = np.flatnonzero(numbers > wave)
        rows[begin : begin + size], tokens[begin : begin + size] = there, firsts[there] + wave
        begin += _aligned(size)
    return rows, tokens, sizes


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def gated_delta_net(x: Tensor, weights: DeltaWeights, shape: RecurrentShape, state: Tensor, plan: Waves) -> Tensor:
    """As `recurrent.gated_delta_net`."""
    out = x.new_empty(len(x), shape.values)
    for rows, tokens in plan.waves:
        recurrent_step.delta_step(x, weights, shape, state, plan.slots, plan.positions, rows, tokens, out, _tune(shape))
    return out


def mamba2(x: Tensor, weights: MambaWeights, shape: RecurrentShape, state: Tensor, plan: Waves) -> Tensor:
    """As `recurrent.mamba2`."""
    out = x.new_empty(len(x), shape.values)
    for rows, tokens in plan.waves:
        recurrent_step.mamba_step(x, weights, shape, state, plan.slots, plan.positions, rows, tokens, out, _tune(shape))
    norm_groups(out, x, weights, shape)
    return out


def _tune(shape: RecurrentShape) -> StepTuning:
    key_block, value_block = triton.next_power_of_2(shape.key_dim), triton.next_power_of_2(shape.value_dim)
    value_block = min(value_block, VALUE_BLOCK)
    return StepTuning(value_block, min(16, max(1, key_block * value_block // 1024)))
