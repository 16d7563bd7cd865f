"""Recurrent layers for steps that mix decode and prefill rows; the counterpart of `reference.recurrent`.

A decode-only step needs nothing from the host, so it can be captured; a mixed step uploads one small table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.recurrent_types import DeltaWeights, MambaWeights, RecurrentShape
from quire.kernels.triton.launch import launch_options, let_next_start, wait_for_inputs
from quire.kernels.triton.recurrent import scan as recurrent_scan
from quire.kernels.triton.recurrent import step
from quire.kernels.triton.recurrent.step import silu
from quire.kernels.upload import Arrays, upload

TOKENS = 2  # tokens whose groups one program normalizes


@dataclass(slots=True)
class TritonRecurrentPlan:
    """A step's rows for recurrent layers, and the work that the first layer prepares."""

    slots: Tensor  # [rows] int64
    positions: Tensor  # [tokens] int64
    counts: list[int]
    prepared: RecurrentWork | None = None  # created when the first layer runs, which knows the chunk size


@dataclass(frozen=True, slots=True)
class RecurrentWork:
    """Work lists of decode and prefill rows, shared by all recurrent layers of a step."""

    chunk: int
    num_decodes: int
    decodes: Tensor | None = None  # [decode rows] int64: their rows; None: all rows, in order
    decode_tokens: Tensor | None = None  # [decode rows] int64: their tokens
    rows: Tensor | None = None  # [prefill rows, 4] int32: row, first token, count, first tile; None: there are none
    tiles: Tensor | None = None  # [tiles, 4] int32: row, first token, offset, count


def plan_recurrent(slots: Tensor, positions: Tensor, counts: list[int]) -> TritonRecurrentPlan:
    """Implements `reference.recurrent.plan_recurrent`."""
    return TritonRecurrentPlan(slots, positions, counts)


def gated_delta_net(
    x: Tensor, weights: DeltaWeights, shape: RecurrentShape, state: Tensor, plan: TritonRecurrentPlan
) -> Tensor:
    """Implements `reference.recurrent.gated_delta_net`."""
    return run_delta_net(x, weights, shape, state, plan, _scan_and_norm)


def run_delta_net(
    x: Tensor,
    weights: DeltaWeights,
    shape: RecurrentShape,
    state: Tensor,
    plan: TritonRecurrentPlan,
    scan: Callable[..., None],
) -> Tensor:
    """Apply a gated delta net. `scan` computes the prefill rows, with the arguments of `scan.delta_scan`, norm and gate
    included."""
    work = _prepare(plan, shape, x.dtype)
    out = x.new_empty(len(x), shape.values)
    where = (shape, state, plan.slots, plan.positions)
    if work.rows is not None and work.tiles is not None:
        scan(x, weights, *where, work.rows, work.tiles, out, work.chunk)
    if work.num_decodes:
        step.delta_step(x, weights, *where, work.decodes, work.decode_tokens, out)
    return out


def _scan_and_norm(
    x: Tensor,
    weights: DeltaWeights,
    shape: RecurrentShape,
    state: Tensor,
    slots: Tensor,
    positions: Tensor,
    rows: Tensor,
    tiles: Tensor,
    out: Tensor,
    chunk: int,
) -> None:
    recurrent_scan.delta_scan(x, weights, shape, state, slots, positions, rows, tiles, out, chunk)
    norm_tiles(out, x, shape.channels, weights, shape, tiles, chunk, use_silu=True)


def norm_tiles(
    out: Tensor,
    gate: Tensor,
    column: int,
    weights: DeltaWeights,
    shape: RecurrentShape,
    tiles: Tensor,
    chunk: int,
    *,
    use_silu: bool,
) -> None:
    """Normalize, in place, the delta rule's outputs `out` [tokens, values] of these chunks' tokens, and multiply them
    with the gate in `gate` [tokens, ...] from `column` on: its SiLU, or, if not `use_silu`, its sigmoid."""
    _norm_tiles_kernel[(len(tiles), shape.num_heads)](
        out,
        gate,
        weights.norm,
        tiles,
        gate.stride(0),
        weights.eps,
        GATE=column,
        HEADS=shape.num_heads,
        VALUE=shape.value_dim,
        TOKENS=chunk,
        BLOCK=triton.next_power_of_2(shape.value_dim),
        CURVED=use_silu,
        **launch_options(out.device, 4),
    )


def mamba2(x: Tensor, weights: MambaWeights, shape: RecurrentShape, state: Tensor, plan: TritonRecurrentPlan) -> Tensor:
    """Apply Mamba2. A norm, if present, applies the gate too: gating in the chunk walk cost more than in the norm."""
    return run_mamba(x, weights, shape, state, plan, recurrent_scan.mamba_scan, gated=weights.norm is None)


def run_mamba(
    x: Tensor,
    weights: MambaWeights,
    shape: RecurrentShape,
    state: Tensor,
    plan: TritonRecurrentPlan,
    scan: Callable[..., None],
    *,
    gated: bool,
) -> Tensor:
    """Apply Mamba2. `scan` computes the prefill rows, with the arguments of `scan.mamba_scan`. `gated`: apply the gate
    when the output is computed, which is allowed only if no norm precedes it (see `MambaWeights.gated_early`)."""
    work = _prepare(plan, shape, x.dtype)
    out = x.new_empty(len(x), shape.values)
    where = (shape, state, plan.slots, plan.positions)
    if work.rows is not None and work.tiles is not None:
        scan(x, weights, *where, work.rows, work.tiles, out, work.chunk, gated=gated)
    if work.num_decodes:
        step.mamba_step(x, weights, *where, work.decodes, work.decode_tokens, out, gated=gated)
    if weights.norm is not None:
        norm_groups(out, x, weights, shape, gated=gated)
    return out


def norm_groups(out: Tensor, x: Tensor, weights: MambaWeights, shape: RecurrentShape, *, gated: bool) -> None:
    """Normalize Mamba2's outputs `out` [tokens, values] in place, and gate them unless they already are (`gated`)."""
    width = shape.values // weights.norm_groups
    block = triton.next_power_of_2(width)
    _norm_groups_kernel[(triton.cdiv(len(x), TOKENS), weights.norm_groups)](
        out,
        x,
        weights.norm,
        len(x),
        x.stride(0),
        weights.eps,
        width,
        VALUES=shape.values,
        BLOCK=block,
        TOKENS=TOKENS,
        GATED=gated,
        GATE_FIRST=weights.gate_first,
        **launch_options(x.device, min(max(TOKENS * block // 512, 1), 16)),
    )


@triton.jit
def _norm_tiles_kernel(
    out_ptr,
    x_ptr,
    norm_ptr,
    tiles_ptr,
    x_stride,
    eps,
    GATE: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    CURVED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: norm and gate of one head of a tile's tokens, in place."""
    let_next_start(PDL)
    tile, head = tl.program_id(0), tl.program_id(1)
    n, values = tl.arange(0, TOKENS), tl.arange(0, BLOCK)
    weight = tl.load(norm_ptr + values, mask=values < VALUE, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    offset = tl.load(tiles_ptr + 4 * tile + 2)
    tokens = (tl.load(tiles_ptr + 4 * tile + 1).to(tl.int64) + offset + n)[:, None]
    inside = (offset + n < tl.load(tiles_ptr + 4 * tile + 3))[:, None] & (values < VALUE)[None, :]
    target = out_ptr + tokens * (HEADS * VALUE) + head * VALUE + values[None, :]
    out = tl.load(target, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x_ptr + tokens * x_stride + GATE + head * VALUE + values[None, :], mask=inside, other=0.0)
    gate = gate.to(tl.float32)
    gate = silu(gate) if CURVED else tl.sigmoid(gate)
    out *= tl.rsqrt(tl.sum(out * out, 1) / VALUE + eps)[:, None] * weight[None, :] * gate
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _norm_groups_kernel(
    out_ptr,
    x_ptr,
    norm_ptr,
    num_tokens,
    x_stride,
    eps,
    width,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    GATED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: norm of one group of some tokens' values, in place, and gate unless GATED."""
    let_next_start(PDL)
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    values = tl.arange(0, BLOCK)
    columns = tl.program_id(1) * width + values
    weight = tl.load(norm_ptr + columns, mask=values < width, other=0.0).to(tl.float32)[None, :]
    wait_for_inputs(PDL)
    inside = (tokens < num_tokens) & (values < width)[None, :]
    target = out_ptr + tokens * VALUES + columns[None, :]
    out = tl.load(target, mask=inside, other=0.0).to(tl.float32)
    gate = 1.0
    if not GATED:
        gate = silu(tl.load(x_ptr + tokens * x_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32))
    if GATE_FIRST:
        out *= gate
    out *= tl.rsqrt(tl.sum(out * out, 1) / width + eps)[:, None] * weight
    if not GATE_FIRST:
        out *= gate
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=inside)


def _prepare(plan: TritonRecurrentPlan, shape: RecurrentShape, dtype: torch.dtype) -> RecurrentWork:
    return prepare(plan, recurrent_scan.chunk_tokens(shape, dtype))


def prepare(plan: TritonRecurrentPlan, chunk: int) -> RecurrentWork:
    """Return the plan's work lists, created once: all recurrent layers of a model use chunks of one size."""
    if plan.prepared is None:
        plan.prepared = _list_work(plan, chunk)
    return plan.prepared


def _list_work(plan: TritonRecurrentPlan, chunk: int) -> RecurrentWork:
    """List decode rows, prefill rows and their chunks, and upload the lists."""
    counts = plan.counts
    if all(count == 1 for count in counts):
        return RecurrentWork(chunk, len(counts))
    firsts = np.cumsum([0, *counts[:-1]])
    decodes = [row for row, count in enumerate(counts) if count == 1]
    longer = [row for row, count in enumerate(counts) if count > 1]
    num_tiles = [-(-counts[row] // chunk) for row in longer]
    first_tiles = np.cumsum([0, *num_tiles[:-1]])
    rows = [(row, firsts[row], counts[row], tile) for row, tile in zip(longer, first_tiles, strict=True)]
    tiles = [(row, first, offset, count) for row, first, count, _ in rows for offset in range(0, count, chunk)]
    arrays: Arrays = {
        "decodes": np.array(decodes, np.int64),
        "decode_tokens": firsts[decodes].astype(np.int64),
        "rows": np.array(rows, np.int32),
        "tiles": np.array(tiles, np.int32),
    }
    sent = upload({"plan": arrays}, plan.slots.device)["plan"]
    return RecurrentWork(chunk, len(decodes), **sent)
