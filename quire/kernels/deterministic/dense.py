"""Deterministic ops in torch for CPUs without the native library: a token's results are bitwise independent of the rest
of the batch.

Libraries choose their loops by the shape of a product, so a row's sums change with the number of rows beside it. Here
every product has one shape, padded where there is less: tiles of `TILE_ROWS` rows and keys in blocks of `KEY_BLOCK`; or
its shape depends only on the positions of its tokens. Everything between the products is one correctly rounded
operation per element, a sum over one row, or runs in the same tiles. `tests/cpu/test_deterministic.py` checks it;
`docs/reliability.md` has the cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.activations import CURVES, Curve
from quire.kernels.angles import Angles, angle_tables
from quire.kernels.reference.small_ops import write_kv

TILE_ROWS = 16  # rows of every product
TILE_QUERIES = 4  # queries of one row per attention tile: positions 4 i to 4 i + 3
KEY_BLOCK = 512  # keys are padded to a multiple of this, the block size of torch's attention kernel
SHORT_LENGTHS = (128, 256)  # padded sizes for fewer keys; multiples of TILE_QUERIES
LANES = 64  # elements; multiples of it have no remainder that torch's vector loops compute differently
SLICE = 32768  # elements; torch splits larger elementwise work over threads, whose remainders round differently


# ---------------------------------------------------------------------------------------------------------------------
# Products and what goes with them


class TiledLinear:
    """Implements `FusedLinear` in tiles, for any number of rows."""

    def wins(self, num_rows: int, weight: Tensor, gate: Curve | None) -> bool:
        return True

    def run(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        eps: float,
        gate: Curve | None,
        residual: Tensor | None,
    ) -> Tensor:
        def product(tile: Tensor) -> Tensor:
            if norm_weight is not None:
                tile = functional.rms_norm(tile, norm_weight.shape, norm_weight, eps)
            out = functional.linear(tile, weight, bias)
            return out if gate is None else _gate_mul(out, gate)

        out = in_tiles(product, x)
        return out if residual is None else out.add_(residual)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return in_tiles(lambda tile: functional.rms_norm(tile, weight.shape, weight, eps), x)


def gate_mul(gate_up: Tensor, curve: Curve = "silu") -> Tensor:
    return in_tiles(lambda tile: _gate_mul(tile, curve), gate_up)


def _gate_mul(gate_up: Tensor, curve: Curve) -> Tensor:
    """Computes `gate_mul` of one tile, whose even number of rows leaves no slice with a remainder."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.contiguous()
    for part in gate.view(-1).split(SLICE):
        part.copy_(CURVES[curve](part))
    return gate.mul_(up)


def in_tiles(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies `function` to x [rows, ...] in tiles of exactly `TILE_ROWS` rows; the last tile is padded with zeros."""
    num_rows = len(x)
    if num_rows == TILE_ROWS:
        return function(x)
    out: Tensor | None = None
    for first in range(0, num_rows, TILE_ROWS):
        tile = x[first : first + TILE_ROWS]
        count = len(tile)
        if count < TILE_ROWS:
            tile = torch.cat((tile, tile.new_zeros(TILE_ROWS - count, *tile.shape[1:])))
        done = function(tile)
        if num_rows < TILE_ROWS:
            return done[:count]
        out = done.new_empty(num_rows, *done.shape[1:]) if out is None else out
        out[first : first + count] = done[:count]
    return x.new_empty(0) if out is None else out


def elementwise(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """The reference's `elementwise`, in slices without remainders."""
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    flat = [x.expand(shape).reshape(-1) for x in tensors]
    num_elements = len(flat[0])
    if ragged := -num_elements % LANES:
        flat = [functional.pad(x, (0, ragged)) for x in flat]
    slices = zip(*(x.split(SLICE) for x in flat), strict=True)
    return torch.cat([function(*parts) for parts in slices])[:num_elements].view(shape)


# ---------------------------------------------------------------------------------------------------------------------
# Rope


def plan_angles(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> Angles:
    """Computes cos and sin tables in tiles, because torch uses another formula for part of a long tensor."""

    def tables(tile: Tensor) -> Tensor:
        angles = angle_tables(tile, frequencies, scale, dtype)
        assert angles.cos is not None and angles.sin is not None
        return torch.stack((angles.cos, angles.sin), dim=1)

    cos, sin = in_tiles(tables, positions).unbind(1)
    return Angles(cos=cos, sin=sin)


def qk_norm_rope_write(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    angles: Angles,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    num_heads: int,
) -> Tensor:
    """The reference's op with the rotation in single steps, because a fused one rounds remainders differently."""
    kv_heads, head_dim = k_cache.shape[2:]
    qk, v = qkv.view(len(qkv), -1, head_dim).split_with_sizes((num_heads + kv_heads, kv_heads), dim=1)
    if q_weight is not None and k_weight is not None:
        qk = in_tiles(lambda tile: functional.rms_norm(tile, (head_dim,), None, eps), qk)
        qk[:, :num_heads].mul_(q_weight)
        qk[:, num_heads:].mul_(k_weight)
    assert angles.cos is not None and angles.sin is not None
    turned = (qk * angles.cos).add_(qk.roll(head_dim // 2, -1).mul_(angles.sin))
    q, k = turned.split_with_sizes((num_heads, kv_heads), dim=1)
    write_kv(k, v, k_cache, v_cache, slots)
    return q


# ---------------------------------------------------------------------------------------------------------------------
# Attention


@dataclass(frozen=True, slots=True)
class Tiles:
    """Query tiles attended in one call: one tile each of several rows, or several tiles of one row."""

    token_index: Tensor  # [tiles * TILE_QUERIES] int64: indices into the step's tokens; padding repeats a tile's first
    pages: Tensor  # [rows, pages] int64
    mask: Tensor  # [tiles, TILE_QUERIES, keys]: 0 or -inf
    num_keys: int


@dataclass(frozen=True, slots=True)
class TilePlan:
    num_tokens: int
    calls: list[Tiles] = field(default_factory=list)


def plan_attention(
    page_table: Tensor,
    positions: Tensor,
    counts: list[int],
    len_bounds: list[int],
    page_tokens: int,
    window: int | None,
    dtype: torch.dtype,
) -> TilePlan:
    """The reference's `plan_attention`, with shapes from positions only; `len_bounds` is unused."""
    plan = TilePlan(sum(counts))
    planner = _TilePlanner(positions, page_tokens, window, dtype)
    host_positions = positions.tolist()
    alone: dict[int, tuple[list[int], list[list[int]]]] = {}  # number of keys -> rows with one tile, and their tiles
    first = 0
    for row, count in enumerate(counts):
        by_keys = _tiles_of(range(first, first + count), host_positions)
        first += count
        for num_keys, tiles in by_keys.items():
            if len(tiles) == 1:
                rows, found = alone.setdefault(num_keys, ([], []))
                rows.append(row)
                found += tiles
            else:
                plan.calls.append(planner.plan_tiles(page_table[row : row + 1], tiles, num_keys))
    for num_keys, (rows, tiles) in alone.items():
        plan.calls.append(planner.plan_tiles(page_table[rows], tiles, num_keys))
    return plan


def _tiles_of(tokens: range, positions: list[int]) -> dict[int, list[list[int]]]:
    """Groups one row's tokens into tiles by their number of keys. Both depend on positions only, so that a token's
    attention has the same shape whatever chunks its prompt is prefilled in."""
    found: dict[int, dict[int, list[int]]] = {}
    for token in tokens:
        tile = positions[token] // TILE_QUERIES
        found.setdefault(_padded_keys((tile + 1) * TILE_QUERIES), {}).setdefault(tile, []).append(token)
    return {
        num_keys: [tile + tile[:1] * (TILE_QUERIES - len(tile)) for tile in tiles.values()]
        for num_keys, tiles in found.items()
    }


def _padded_keys(num_keys: int) -> int:
    return next((size for size in SHORT_LENGTHS if num_keys <= size), -(-num_keys // KEY_BLOCK) * KEY_BLOCK)


@dataclass(frozen=True, slots=True)
class _TilePlanner:
    positions: Tensor
    page_tokens: int
    window: int | None
    dtype: torch.dtype

    def plan_tiles(self, table: Tensor, tiles: list[list[int]], num_keys: int) -> Tiles:
        num_pages = -(-num_keys // self.page_tokens)
        if table.shape[1] < num_pages:  # no query sees keys beyond the table, so page 0 is a valid padding
            table = functional.pad(table, (0, num_pages - table.shape[1]))
        index = torch.tensor(tiles, dtype=torch.int64)  # [tiles, TILE_QUERIES]
        queries, keys = self.positions[index].unsqueeze(-1), torch.arange(num_keys)
        hidden = keys > queries  # [tiles, TILE_QUERIES, keys]
        if self.window is not None:
            hidden |= keys <= queries - self.window
        mask = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, -torch.inf)
        return Tiles(index.view(-1), table[:, :num_pages].long(), mask, num_keys)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: TilePlan,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The reference's `paged_attention` in query tiles; soft caps and sinks are not supported."""
    assert softcap is None and sinks is None, "no family with soft caps or sinks runs in this mode yet"
    out = q.new_empty(plan.num_tokens, q.shape[1] * q.shape[2])
    for call in plan.calls:
        out[call.token_index] = _attend(q[call.token_index], k_cache, v_cache, call, scale)
    return out


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, call: Tiles, scale: float) -> Tensor:
    """Attends q [tiles * TILE_QUERIES, heads, head_dim]; returns [tiles * TILE_QUERIES, heads * head_dim]. Query heads
    that share a KV head become queries of it, so every call of torch's kernel has equally many queries over whole key
    blocks."""
    num_tiles, kv_heads, head_dim = len(call.mask), k_cache.shape[2], k_cache.shape[3]
    group = q.shape[1] // kv_heads
    q = q.view(num_tiles, TILE_QUERIES, kv_heads, group, head_dim).permute(0, 2, 1, 3, 4)
    q = q.reshape(num_tiles, kv_heads, TILE_QUERIES * group, head_dim)
    k, v = (_gather(cache, call, num_tiles) for cache in (k_cache, v_cache))
    mask = call.mask.repeat_interleave(group, dim=1).unsqueeze(1)
    if num_tiles * kv_heads == 1:  # torch would split a single head over threads differently
        q, k, v, mask = (x.expand(2, -1, -1, -1) for x in (q, k, v, mask))
    out = functional.scaled_dot_product_attention(q, k, v, mask, scale=scale)[:num_tiles]
    out = out.view(num_tiles, kv_heads, TILE_QUERIES, group, head_dim).permute(0, 2, 1, 3, 4)
    return out.reshape(num_tiles * TILE_QUERIES, -1)


def _gather(cache: Tensor, call: Tiles, num_tiles: int) -> Tensor:
    """Returns the tiles' cache entries, [tiles, kv_heads, keys, head_dim]; tiles of one row share memory."""
    num_rows = len(call.pages)
    found = cache.index_select(0, call.pages.view(-1)).view(num_rows, -1, *cache.shape[2:])
    found = found[:, : call.num_keys].transpose(1, 2)
    return found.expand(num_tiles, -1, -1, -1) if num_rows == 1 else found
