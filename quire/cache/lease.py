"""What one request holds in the cache, and the hash chain that names its pages.

A lease lives as long as its request: empty while it waits, units on the device while it runs, units on the host while
it is swapped out. Only `CacheIndex` changes it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.cache.tree import PrefixTree, page_key, root_key
from quire.types import Request

TOKEN_BYTES = 4
TOKEN_CODE = "I"  # of arrays: ids are never negative, and this code packs them in a third of the time of "i"


def token_bytes(tokens: Sequence[int]) -> bytes:
    return array(TOKEN_CODE, tokens).tobytes()


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
    snapshots: list[Snapshot] = field(default_factory=list)
    claimed: list[bytes] = field(default_factory=list)  # keys this request has announced it is computing
    fork_point: int = 0  # where its prompt leaves cached prefixes, if a snapshot or a window is worth keeping there
    claims_tail: bool = False  # it announced its prompt's tail, and has not computed it yet
    _packed: array[int] = field(default_factory=lambda: array(TOKEN_CODE))  # the tokens seen so far

    @classmethod
    def empty(cls, salt: bytes, page_tokens: int, num_groups: int) -> Lease:
        return cls(root_key(salt), page_tokens, units=[[] for _ in range(num_groups)])

    @property
    def is_empty(self) -> bool:
        return not any(self.units)

    def pack(self, tokens: list[int]) -> array[int]:
        """All tokens as 32-bit numbers, which takes a long prompt as long as hashing does: once for all who want them.
        Whoever keeps it makes a copy."""
        if len(self._packed) < len(tokens):
            self._packed += array(TOKEN_CODE, tokens[len(self._packed) :])
        return self._packed

    def pages(self, tokens: list[int], first: int, last: int) -> list[bytes]:
        """The tokens of pages `first` to `last`, each as bytes."""
        size, width = self.page_tokens, self.page_tokens * TOKEN_BYTES
        data = self.pack(tokens)[first * size : last * size].tobytes()
        return [data[begin : begin + width] for begin in range(0, len(data), width)]

    def extend_keys(self, tokens: list[int], num_pages: int, tree: PrefixTree | None = None) -> None:
        """Go on until `num_pages` pages are named; pages already named are final. What `tree` has is named there, and
        found by its tokens in a fifth of the time of a hash."""
        first, last = len(self.keys), min(num_pages, len(tokens) // self.page_tokens)
        if first >= last:
            return
        parent = self.keys[-1] if self.keys else self.root
        node = None if tree is None else tree.find(parent)
        for page in self.pages(tokens, first, last):
            if node is not None:
                node = node.children.get(page)
            parent = page_key(parent, page) if node is None else node.key
            self.keys.append(parent)


def lease_of(request: Request) -> Lease:
    """Return the lease of a request that has been queued."""
    lease = request.lease
    assert isinstance(lease, Lease), "a request gets its lease when it is queued"
    return lease
