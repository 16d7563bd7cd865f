"""Work lists of deterministic attention: the tiles of a step, eager or captured, and which of them are split by spans.

The deterministic ops row on CUDA takes `paged_attention` and `CapturedTiles` from here. No decision made here changes a
result: a tile's spans are computed alike by one program or by many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from quire.kernels.triton.attention import prefill
from quire.kernels.triton.attention.decode import padded_dim
from quire.kernels.triton.attention.deterministic import (
    SPAN,
    TILE_FIELDS,
    DeterministicTuning,
    SpanPartials,
    attend_tiles,
    tune,
)
from quire.kernels.triton.attention.paged import Scales, TritonPlan, upload_ints
from quire.kernels.triton.launch import num_multiprocessors

WAVES = 4  # programs per multiprocessor that keep it busy
MAX_PARTIAL_BYTES = 64 << 20
NO_SLOT = -1


@dataclass(slots=True)
class TileWork:
    """Work list and buffers that all layers of a step share."""

    tuning: DeterministicTuning
    tiles: Tensor  # int32, flat
    num_tiles: int
    num_shares: int  # programs per tile with slots
    partials: SpanPartials


@dataclass(frozen=True, slots=True)
class _TileShape:
    """Shape of the heads and the device, which determine how far tiles are split."""

    num_kv_heads: int
    head_dim: int
    group: int
    tuning: DeterministicTuning
    device: torch.device

    @classmethod
    def of(cls, q: Tensor, k_cache: Tensor) -> _TileShape:
        num_kv_heads, head_dim = k_cache.shape[2], k_cache.shape[3]
        group = q.shape[1] // num_kv_heads
        return cls(num_kv_heads, head_dim, group, tune(group, head_dim, q.element_size()), q.device)

    @property
    def tile_tokens(self) -> int:
        """Tokens of one tile."""
        return max(1, self.tuning.block_q // triton.next_power_of_2(self.group))

    def num_shares(self, num_tiles: int, max_spans: int) -> int:
        """Programs per tile with slots, so that all tiles together occupy the GPU."""
        wanted = WAVES * num_multiprocessors(self.device.index) // max(num_tiles * self.num_kv_heads, 1)
        return max(1, min(wanted, max_spans))

    def max_slots(self, lanes: int) -> int:
        """Maximum number of slots within MAX_PARTIAL_BYTES."""
        return MAX_PARTIAL_BYTES // (self.num_kv_heads * lanes * padded_dim(self.head_dim) * 4)

    def partials(self, num_slots: int, lanes: int) -> SpanPartials:
        return SpanPartials.create(num_slots, self.num_kv_heads, lanes, self.head_dim, self.device)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: TritonPlan,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scales: Scales | None = None,
) -> Tensor:
    """Attend as `paged.paged_attention`, with the same plans."""
    if plan.prepared is None:
        shape = _TileShape.of(q, k_cache)
        if plan.work is not None:
            plan.prepared = plan.work.prepare(plan, shape)
        else:
            plan.prepared = _plan_decodes(plan, shape) if set(plan.counts) == {1} else _plan_mixed(plan, shape)
    work = plan.prepared
    scales = scales or Scales()
    num_tokens, num_heads, head_dim = q.shape
    # A captured step may contain padding tokens that no row attends for; what they write to the cache must be finite.
    out = (q.new_empty if plan.work is None else q.new_zeros)(num_tokens, num_heads * head_dim)
    attend_tiles(
        q,
        k_cache,
        v_cache,
        plan.page_table,
        plan.positions,
        scale,
        work.tuning,
        work.tiles,
        work.num_tiles,
        work.num_shares,
        work.partials,
        out=out,
        softcap=softcap,
        window=plan.window,
        sinks=sinks,
        k_scale=scales.k,
        v_scale=scales.v,
    )
    return out


def _max_spans(num_keys: int, window: int | None) -> int:
    """Maximum number of spans that a token of a sequence of at most `num_keys` keys attends to."""
    spans = -(-num_keys // SPAN)
    return spans if window is None else min(spans, -(-window // SPAN) + 2)


def _plan_decodes(plan: TritonPlan, shape: _TileShape) -> TileWork:
    """Work of a decode-only step. It needs only a length bound from the host: the list is made on the device, so the
    step can be captured."""
    num_tiles, lanes = len(plan.counts), triton.next_power_of_2(shape.group)
    max_spans = _max_spans(plan.page_table.shape[1] * plan.page_tokens, plan.window)
    num_shares = shape.num_shares(num_tiles, max_spans)
    is_shared = num_shares > 1 and num_tiles * max_spans <= shape.max_slots(lanes)
    places = torch.arange(num_tiles, dtype=torch.int32, device=shape.device)
    rows = places if plan.row_index is None else plan.row_index.to(torch.int32).clamp_(min=0)
    slots = places * max_spans if is_shared else torch.full_like(places, NO_SLOT)
    tiles = torch.stack((rows, places, torch.ones_like(places), slots), dim=1).view(-1)
    partials = shape.partials(num_tiles * max_spans if is_shared else 0, lanes)
    return TileWork(shape.tuning, tiles, num_tiles, num_shares if is_shared else 1, partials)


def _plan_mixed(plan: TritonPlan, shape: _TileShape) -> TileWork:
    """Work of a mixed step, listed on the host and uploaded."""
    assert plan.row_index is None, "a permanent page table is for decode-only steps"
    max_slots = shape.max_slots(shape.tuning.block_q)
    fields, num_slots = list_tiles(
        plan.counts, plan.len_bounds, plan.window, shape.tile_tokens, max_slots, shape.num_shares
    )
    num_shares = shape.num_shares(len(fields), _max_spans(max(plan.len_bounds), plan.window)) if num_slots else 1
    tiles = upload_ints([fields.reshape(-1)], shape.device)[0]
    return TileWork(shape.tuning, tiles, len(fields), num_shares, shape.partials(num_slots, shape.tuning.block_q))


def list_tiles(
    counts: list[int],
    len_bounds: list[int],
    window: int | None,
    tile_tokens: int,
    max_slots: int,
    num_shares: Callable[[int, int], int],
) -> tuple[np.ndarray, int]:
    """Fields of every tile, [tiles, TILE_FIELDS] int32, heaviest first, and the total number of slots. Tiles get slots
    only where there are too few tiles to occupy the GPU."""
    tiles = prefill.list_tiles([row for row, count in enumerate(counts) if count], counts, len_bounds, tile_tokens)
    fields = np.array(tiles, np.int32).reshape(-1, TILE_FIELDS)
    spans = [_max_spans(int(bound), window) for bound in fields[:, 3]]
    fields[:, 3] = NO_SLOT
    num_slots = 0
    if num_shares(len(tiles), max(spans, default=1)) > 1:
        for index, count in enumerate(spans):
            if count > 1 and num_slots + count <= max_slots:
                fields[index, 3] = num_slots
                num_slots += count
    return fields, num_slots


class CapturedTiles:
    """Deterministic tiles at fixed addresses, for captured mixed steps; the counterpart of `captured_work`."""

    def __init__(self, num_tokens: int, num_decodes: int, num_prefills: int):
        self._num_tokens, self._num_rows = num_tokens, num_decodes + num_prefills
        self._work: TileWork | None = None
        self._shape: _TileShape | None = None
        self._window: int | None = None
        self._max_slots = 0

    @property
    def is_used(self) -> bool:
        """Whether a layer has attended with it."""
        return self._work is not None

    def prepare(self, plan: TritonPlan, shape: _TileShape) -> TileWork:
        """Allocate the lists at the first run; later calls return the same work."""
        if self._work is None:
            num_tiles = -(-self._num_tokens // shape.tile_tokens) + self._num_rows
            self._shape, self._window = shape, plan.window
            tiles = torch.zeros(num_tiles * TILE_FIELDS, dtype=torch.int32, device=shape.device)
            tiles[TILE_FIELDS - 1 :: TILE_FIELDS] = NO_SLOT
            max_spans = _max_spans(plan.page_table.shape[1] * plan.page_tokens, plan.window)
            num_shares = shape.num_shares(-(-self._num_tokens // shape.tile_tokens), max_spans)
            if num_shares > 1:
                self._max_slots = min(num_tiles * max_spans, shape.max_slots(shape.tuning.block_q))
            partials = shape.partials(self._max_slots, shape.tuning.block_q)
            self._work = TileWork(shape.tuning, tiles, num_tiles, num_shares, partials)
        return self._work

    def fill(self, counts: list[int], len_bounds: list[int]) -> None:
        """List the next step's work. `counts`: tokens of each row; `len_bounds`: bounds of the rows' lengths."""
        work, shape = self._work, self._shape
        assert work is not None and shape is not None, "the first run sizes the lists"
        fields, _ = list_tiles(counts, len_bounds, self._window, shape.tile_tokens, self._max_slots, shape.num_shares)
        numbers = np.zeros((work.num_tiles, TILE_FIELDS), np.int32)
        numbers[:, 3] = NO_SLOT
        numbers[: len(fields)] = fields
        host = torch.from_numpy(numbers.reshape(-1))
        work.tiles.copy_(host.pin_memory() if work.tiles.is_cuda else host, non_blocking=True)
