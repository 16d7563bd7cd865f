"""What one request holds in the cache, and the hash chain that names its pages.

A lease lives as long as its request: empty while it waits, units on the device while it runs, units on the host while
it is swapped out. Only `CacheIndex` changes it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from quire.cache.tree import page_key, root_key

TOKEN_BYTES = 4


def token_bytes(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


@dataclass(slots=True)
class Snapshot:
    """A state slot per state group, filled by a step in flight with the state at `length` tokens."""

    length: int
    slots: dict[int, int]  # group -> slot


@dataclass(slots=True, eq=False)
class Lease:
    root: bytes
    page_tokens: int
    keys: list[bytes] = field(default_factory=list)  # one per full page of the tokens seen so far
    units: list[list[int]] = field(default_factory=list)  # per group: pages by page index (ABSENT: not needed any
    # more, it fell out of the window), or the one live state slot
    host: list[list[int]] = field(default_factory=list)  # the same, on the host, while swapped out
    num_inserted: int = 0  # leading pages that have been offered to the tree
    num_dropped: int = 0  # leading pages given back by window groups
    snapshots: list[Snapshot] = field(default_factory=list)
    claimed: list[bytes] = field(default_factory=list)  # keys this request has announced it is computing
    fork: int = 0  # where its prompt leaves what others have computed, if a snapshot is worth taking there
    leads_tail: bool = False  # it announced its prompt's tail, and has not computed it yet

    @classmethod
    def empty(cls, salt: bytes, page_tokens: int, num_groups: int) -> Lease:
        return cls(root_key(salt), page_tokens, units=[[] for _ in range(num_groups)])

    @property
    def is_empty(self) -> bool:
        return not any(self.units)

    def extend_keys(self, tokens: list[int], num_pages: int) -> None:
        """Hash on until `num_pages` pages are named; pages already named are final."""
        size = self.page_tokens
        first, last = len(self.keys), min(num_pages, len(tokens) // size)
        if first >= last:
            return
        data, width = token_bytes(tokens[first * size : last * size]), size * TOKEN_BYTES
        parent = self.keys[-1] if self.keys else self.root
        for begin in range(0, len(data), width):
            parent = page_key(parent, data[begin : begin + width])
            self.keys.append(parent)
