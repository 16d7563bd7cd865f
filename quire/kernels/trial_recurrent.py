"""Gives gated delta nets Hopper's walk over chunks (`triton/recurrent_walk.py`), if it is right here.

The loader calls `settle_delta_net` for models that have such layers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.recurrent import DeltaWeights, RecurrentShape
from quire.kernels.table import REFERENCE, Ops
from quire.kernels.trial import compare, finish_writes
from quire.kernels.trial_hopper import runs_on_hopper, settle_row

NAME = "delta net's walk for Hopper"
# Tokens of each row: catch-ups of whole chunks and of parts of them beside single tokens, then on from there.
STEPS = ((65, 1, 130, 1), (1, 2, 64, 1))


def settle_delta_net(ops: Ops, shape: RecurrentShape, dtype: torch.dtype, device: torch.device, *,
                     strict: bool) -> Ops:  # fmt: skip
    """The table as it is, or with that kernel; see `trial_hopper.settle_row`. It takes the place of Triton's scan and
    of no other: the deterministic mode has reasons for its own."""
    if not runs_on_hopper(ops, device):
        return ops
    from quire.kernels.triton import recurrent
    from quire.kernels.triton.recurrent_scan import fits_walk

    if ops.gated_delta_net is not recurrent.gated_delta_net or not fits_walk(shape, dtype):
        return ops

    def exchange() -> Ops:
        from quire.kernels.triton import recurrent_walk

        return replace(ops, gated_delta_net=recurrent_walk.gated_delta_net)

    return settle_row(ops, NAME, exchange, lambda faster: try_delta_net(faster, shape, dtype, device), strict=strict)


def try_delta_net(ops: Ops, shape: RecurrentShape, dtype: torch.dtype, device: torch.device) -> None:
    """Mixed steps, and what they leave behind. Raises."""

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device)

    weights = DeltaWeights((0.5 * normal(shape.channels, 1, shape.conv_len)).to(dtype), normal(shape.num_heads) - 1.0,
                           normal(shape.num_heads), (normal(shape.value_dim) + 1.0).to(dtype), 1e-6)  # fmt: skip
    num_rows = len(STEPS[0])
    slots = torch.randperm(num_rows, device=device)
    state = 0.1 * normal(num_rows, shape.slot_elements)
    exact = state.clone()
    wide = replace(weights, conv=weights.conv.float(), norm=weights.norm.float())
    ends = [3] * num_rows
    for counts in STEPS:
        positions = torch.cat([torch.arange(end, end + n, device=device) for end, n in zip(ends, counts, strict=True)])
        x = normal(sum(counts), shape.channels + shape.values + 2 * shape.num_heads).to(dtype)
        finish_writes(device)
        plan = ops.plan_recurrent(slots, positions, list(counts))
        got = ops.gated_delta_net(x, weights, shape, state, plan)
        plan = REFERENCE.plan_recurrent(slots, positions, list(counts))
        expected = REFERENCE.gated_delta_net(x.float(), wide, shape, exact, plan)
        compare(got, expected, dtype)
        ends = [end + n for end, n in zip(ends, counts, strict=True)]
    for part in (shape.matrices, shape.rings):
        compare(part(state), part(exact), dtype)
