"""Moves the cache of a whole prefix between tiers for its own sake: down to a store, up to host memory, and held there.

Sessions use it. Each function is one step of a move that takes several polls of the cache; nothing here waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.cache.index import CacheIndex
from quire.cache.tiers.seam import BlockId
from quire.cache.tiers.stored import MAX_STORES
from quire.cache.tree import ABSENT, Node
from quire.types import Request, SamplingParams

MAX_STALLS = 3  # rounds in which nothing more was stored, after which a store is given up


def probe(index: CacheIndex, name: str, tokens: list[int], salt: bytes) -> Request:
    """Return a request that stands for a prefix and is never queued."""
    request = Request(name, list(tokens), len(tokens), SamplingParams(), len(tokens) + 1, salt=salt)
    request.lease = index.empty_lease(request)
    return request


def stored_prefix(index: CacheIndex, request: Request) -> tuple[int, list[BlockId]]:
    """Return how many tokens of a prefix the first store has, and the blocks."""
    length, blocks = index.blocks_of(request, lambda block, unit: index.stores[0].has(block))
    return length, [block for block, _ in blocks]


def ready_tokens(index: CacheIndex, request: Request) -> int:
    """Return how many tokens of a prefix are on the device or in host memory."""
    return index.blocks_of(request, lambda block, unit: unit != ABSENT or index.host.has(block))[0]


@dataclass(slots=True)
class PrefixStore:
    """Has all that the cache holds of a prefix written to the first store."""

    request: Request
    _missing: list[BlockId] | None = None
    _last: int = 0
    _stalls: int = 0

    def poll(self, index: CacheIndex) -> bool:
        """Go on. True: all is written, or no more can be."""
        assert index.tiers is not None
        store, host, tiers = index.stores[0], index.host, index.tiers
        if self._missing is None:
            _, blocks = index.blocks_of(self.request, lambda b, unit: unit != ABSENT or host.has(b) or store.has(b))
            self._missing = [block for block, _ in blocks]
            self._last = len(blocks) + 1
        self._missing = [block for block in self._missing if not store.has(block)]
        if not self._missing:
            return True
        if any(map(tiers.is_moving, self._missing)):
            return False
        self._stalls += len(self._missing) >= self._last
        self._last = len(self._missing)
        if self._stalls >= MAX_STALLS:
            return True
        for block in self._missing[:MAX_STORES]:
            node = index.tree.get(block.key)
            tiers.keep_again(block, ABSENT if node is None else node.units[block.group])
        return False


@dataclass(slots=True)
class PrefixLoad:
    """Has all that stores hold of a prefix loaded into host memory."""

    request: Request
    _started: bool = False

    def poll(self, index: CacheIndex) -> bool:
        """Go on. True: all has come that will come."""
        assert index.tiers is not None
        if not self._started:
            self._started = True
            if not index.stage(self.request, lambda tokens, context: None):
                return True
        if index.tiers.is_staging(self.request):
            return False
        index.tiers.forget(self.request)
        return True


@dataclass(slots=True)
class PrefixPin:
    """A prefix that every tier keeps longest. `release` ends that."""

    index: CacheIndex
    node: Node | None = None
    blocks: list[BlockId] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    @classmethod
    def hold(cls, index: CacheIndex, request: Request, blocks: list[BlockId]) -> PrefixPin:
        match = index.match(request, limit=len(request.tokens))
        pin = cls(index, match.nodes[-1] if match.nodes else None, blocks)
        if pin.node is not None:
            index.tree.pin(pin.node, 1)
            for node in match.nodes:
                index.tree.update_evictable(node, lambda group, unit: index.pools[group].refs(unit) == 1)
        index.host.favoured.update(blocks)
        pin.files = [name for block in blocks for name in index.stores[0].files_of(block)[0]]
        index.stores[0].favour(pin.files, 1)
        return pin

    @classmethod
    def of_files(cls, index: CacheIndex, files: list[str]) -> PrefixPin:
        """Hold files of the first store alone."""
        index.stores[0].favour(files, 1)
        return cls(index, None, [], files)

    def release(self) -> None:
        if self.node is not None:
            self.index.tree.pin(self.node, -1)
        favoured = self.index.host.favoured
        for block in self.blocks:
            favoured[block] -= 1
            if favoured[block] <= 0:
                del favoured[block]
        self.index.stores[0].favour(self.files, -1)
