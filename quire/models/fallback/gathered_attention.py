"""Attention of models that can't use Quire's: the model's own, over keys and values gathered from pages.

Older models, and models with their own masks or biases (ALiBi, chunks, index keys), attend by themselves to whatever a
transformers cache returns. `GatheredRow` is such a cache for one row of a step: it writes new keys and values to the
row's pages and returns all of the row's. Each row is a call of its own, and each layer copies all its keys. That is
slower than paged attention, but works with most models that keep keys in a transformers cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quire.layers.step import PagedInputs, Step
from quire.models.fallback.attention import widen
from quire.models.fallback.recurrent_states import RowStates, StateSlots
from quire.types import CacheSpec

Places = Mapping[int, tuple[CacheSpec, int]]  # layer -> its cache group, its index there


class GatheredRow(RowStates):
    """A cache with the keys and values of one row, and its states (see `RowStates`)."""

    def __init__(
        self, slots: StateSlots, step: Step, caches: Mapping[str, Tensor], places: Places, index_places: Places
    ):
        super().__init__(slots, step, caches)
        self._places = places
        self._index_places = index_places
        # length after this step; synchronizes with the device, as such models do anyway
        self._length = int(step.seq_lens[0])
        self._start = self._length - step.counts[0]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *others: Any, **more: Any) -> tuple[Tensor, Tensor]:
        """Appends keys and values, [1, heads, n, dim] each, and returns those of all tokens so far."""
        new = (keys[0].transpose(0, 1), values[0].transpose(0, 1))
        k, v = (self._append(x, self._places[layer_idx], plane) for plane, x in enumerate(new))
        return k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """Appends index keys, [1, n, dim], and returns those of all tokens so far."""
        return self._append(keys[0].unsqueeze(1), self._index_places[layer_idx], 0).squeeze(1).unsqueeze(0)

    def _append(self, new: Tensor, place: tuple[CacheSpec, int], plane: int) -> Tensor:
        """Writes new tokens, [n, heads, dim], to the row's pages and returns all tokens."""
        spec, layer = place
        inputs = self._step.groups[spec.group]
        assert isinstance(inputs, PagedInputs)
        cache = self._caches[spec.group][layer][plane]  # [pages, page_tokens, heads, width]
        cache.view(-1, *spec.shape)[inputs.slots] = widen(new, spec.shape[-1]).to(cache.dtype)
        pages = inputs.page_table[0, : -(-self._length // spec.page_tokens)].long()
        return cache[pages].flatten(0, 1)[: self._length, :, : new.shape[-1]].to(new.dtype)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._start

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return self._length, 0
