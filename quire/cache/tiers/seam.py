"""The `Tier` protocol: a kind of storage below the device, which keeps blocks that were evicted from above it.

A block is what one group has at one key of the prefix chain: a page's keys and values, or a snapshot of recurrent
state. It moves between a tier and a unit of the level above: between host memory and the device by copies of a plan,
between a store and host memory by threads. `CacheIndex` starts all moves; nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True, order=True)
class BlockId:
    """The name of a block: a cache group and the exact prefix after which the group has it."""

    key: bytes  # key of the prefix chain at the block's last token
    group: int  # index into the model's cache specs
    # The keys of the links that a page covers, for tiers that keep 16 tokens at a time; the last one is `key`.
    links: tuple[bytes, ...] = field(default=(), compare=False)


class BlockTransfer(NamedTuple):
    """A load or store that has ended."""

    block: BlockId
    unit: int  # the block's unit in the level above
    is_load: bool
    ok: bool


class Tier(Protocol):
    """One kind of storage. All calls come from the engine's thread and return at once."""

    name: str

    def has(self, block: BlockId) -> bool:
        """Whether a load of the block can start. A block that is still being stored is not visible."""
        ...

    def load(self, block: BlockId, unit: int) -> bool:
        """Start to copy a block into a unit of the level above. False: it is gone, or the queue is full."""
        ...

    def store(self, block: BlockId, unit: int) -> bool:
        """Start to copy a block from a unit of the level above. False: there is no room, or the queue is full."""
        ...

    def poll(self) -> list[BlockTransfer]:
        """Return the transfers that have ended since the last call. Their units are no longer in use."""
        ...


@dataclass(slots=True)
class TierStats:
    """Counters of one tier since the start."""

    num_blocks: int = 0  # blocks in the tier now
    num_bytes: int = 0  # bytes in the tier now
    hits: int = 0  # blocks loaded
    stores: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    drops: int = 0  # stores without room or with a full queue
    evictions: int = 0
    failures: int = 0  # loads and stores that failed
    corrupt: int = 0  # loads of damaged or foreign blocks, which are among the failures
    queued: int = 0  # transfers under way, now


class TierFault(NamedTuple):
    """A problem of a tier, as a line for operators. Each kind is reported once."""

    kind: str
    what: str
