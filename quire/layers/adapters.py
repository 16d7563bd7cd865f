"""LoRA adapters beside the products of linear layers and embeddings, for batches that mix adapters and the base model.

An adapter is a set of updates, each of some rows of one weight. `AdapterPool` holds those of the adapters in slots, and
the `Route` of the step that runs: which tokens use which slot. `LinearAdapters` is what a layer knows of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

RANK_CLASSES = (8, 16, 32, 64, 128, 256, 512)  # ranks are padded to one of these, so that kernels have few shapes


def padded_rank(rank: int) -> int:
    """Returns the smallest rank class that holds this rank."""
    return next((size for size in RANK_CLASSES if rank <= size), -(-rank // 512) * 512)


@dataclass(frozen=True, slots=True)
class LowRank:
    """An update of a merged weight's rows `start` to `stop`: their outputs get (x A^T) B^T."""

    start: int
    stop: int
    a: Tensor  # [rank, in_features]; zero rows pad it to its class
    b: Tensor  # [stop - start, rank], with the adapter's scale

    def padded(self) -> LowRank:
        """Returns the same update with its rank padded to its class."""
        rank = self.a.shape[0]
        more = padded_rank(rank) - rank
        if not more:
            return self
        a, b = torch.nn.functional.pad(self.a, (0, 0, 0, more)), torch.nn.functional.pad(self.b, (0, more))
        return LowRank(self.start, self.stop, a, b)


@dataclass(frozen=True, slots=True)
class Replaced:
    """New values of a weight's rows `start` to `stop`, of modules that an adapter saves as a whole."""

    start: int
    stop: int
    weight: Tensor  # [stop - start, in_features]


@dataclass(frozen=True, slots=True)
class Adapter:
    """The updates of one adapter, by the number of the weight that they belong to."""

    digest: str
    updates: Mapping[int, Sequence[LowRank | Replaced]]
    rank: int  # the largest one

    @property
    def num_bytes(self) -> int:
        tensors = (
            tensor
            for updates in self.updates.values()
            for one in updates
            for tensor in ((one.a, one.b) if isinstance(one, LowRank) else (one.weight,))
        )
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True, slots=True)
class Group:
    """Tokens of a step that use one slot."""

    slot: int
    tokens: Tensor | slice  # [n] int64, or a range if they are contiguous


class Route:
    """The slots of a step's tokens, and of those of them that are sampled. -1: the base model."""

    def __init__(self, tokens: np.ndarray, samples: np.ndarray, device: torch.device):
        """tokens [tokens], samples [samples]: slots. A layer that computes the sampled tokens only, gets those."""
        self.slots = tokens
        self._groups = {len(samples): _group(samples, device), len(tokens): _group(tokens, device)}
        self.used = frozenset(int(slot) for slot in np.unique(tokens) if slot >= 0)

    @classmethod
    def of_one(cls, slot: int, device: torch.device) -> OneSlot:
        """Returns the route of rows that all use this slot, whatever their number."""
        return OneSlot(slot, device)

    def groups(self, num_rows: int) -> Sequence[Group]:
        """Returns the tokens of each slot in a product with this many rows: all tokens of the step, or the samples."""
        assert num_rows in self._groups, f"a product has {num_rows} rows, the step {sorted(self._groups)}"
        return self._groups[num_rows]


class OneSlot(Route):
    """The route of rows that all use one slot."""

    def __init__(self, slot: int, device: torch.device):
        super().__init__(np.array([slot]), np.array([slot]), device)
        self._all = [Group(slot, slice(None))] if slot >= 0 else []

    def groups(self, num_rows: int) -> Sequence[Group]:
        return self._all


def _group(slots: np.ndarray, device: torch.device) -> Sequence[Group]:
    groups = []
    for slot in np.unique(slots):
        if slot < 0:
            continue
        places = np.flatnonzero(slots == slot)
        first, last = int(places[0]), int(places[-1])
        if last - first + 1 == len(places):
            groups.append(Group(int(slot), slice(first, last + 1)))
        else:
            groups.append(Group(int(slot), torch.from_numpy(places).to(device, non_blocking=True)))
    return groups


@dataclass(slots=True)
class AdapterPool:
    """The adapters in the slots of one device, and the route of the step that runs."""

    slots: list[Adapter | None]
    packed: list[Any]  # the same adapters as the native stack has them; None: it has none
    route: Route | None = None  # None: no token of the step uses an adapter

    def put(self, slot: int, adapter: Adapter, packed: Any) -> None:
        self.slots[slot], self.packed[slot] = adapter, packed

    def updates(self, slot: int, place: int) -> Sequence[LowRank | Replaced]:
        adapter = self.slots[slot]
        assert adapter is not None, "a request uses a slot that holds no adapter"
        return adapter.updates.get(place, ())


@dataclass(frozen=True, slots=True)
class LinearAdapters:
    """The adapters of one weight."""

    pool: AdapterPool
    place: int  # number of the weight

    @property
    def is_used(self) -> bool:
        """Whether a token of this step uses an adapter that changes this weight."""
        route = self.pool.route
        return route is not None and any(self.pool.updates(slot, self.place) for slot in route.used)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Adds the updates to a product. x [tokens, in_features], out [tokens, out_features]"""
        route = self.pool.route
        assert route is not None
        for group in route.groups(len(x)):
            for update in self.pool.updates(group.slot, self.place):
                rows = x[group.tokens]
                if isinstance(update, Replaced):
                    out[group.tokens, update.start : update.stop] = (rows @ update.weight.t()).to(out.dtype)
                    continue
                delta = ((rows @ update.a.t()) @ update.b.t()).to(out.dtype)
                if isinstance(group.tokens, slice):
                    out[group.tokens, update.start : update.stop] += delta
                else:
                    out[:, update.start : update.stop].index_add_(0, group.tokens, delta)

    def look_up(self, vectors: Tensor, tokens: Tensor) -> Tensor:
        """Returns the vectors of tokens with the updates of an embedding. tokens [n], vectors [n, width]"""
        route = self.pool.route
        assert route is not None
        vectors = vectors.clone()
        for group in route.groups(len(tokens)):
            ids = tokens[group.tokens]
            for update in self.pool.updates(group.slot, self.place):
                if isinstance(update, Replaced):
                    vectors[group.tokens] = update.weight[ids].to(vectors.dtype)
                else:
                    vectors[group.tokens] += (update.a.t()[ids] @ update.b.t()).to(vectors.dtype)
        return vectors
