"""Everything one request holds in the cache, and the chain of hashes that are the keys of its pages.

A request has one lease until it ends: empty while the request waits, with units on the device while it runs, and with
units on the host while it is swapped out. Only `CacheIndex` changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.cache.chain import LINK_TOKENS, link_key, link_keys, root_key
from quire.cache.tree import PrefixTree
from quire.types import Request, TokenArray, pack_tokens
from quire.types.plans import TOKEN_BYTES


def token_bytes(tokens: Sequence[int]) -> bytes:
    return pack_tokens(tokens).tobytes()


@dataclass(slots=True)
class Snapshot:
    """One state slot per state group; a step in flight copies the state at `length` tokens into it."""

    length: int
    slots: dict[int, int]  # group -> slot


@dataclass(slots=True, eq=False)
class Lease:
    """One request's units in every group, on the device and on the host, and the keys of its full pages."""

    root: bytes
    page_tokens: int
    keys: list[bytes] = field(default_factory=list)  # one per full page of the tokens seen so far
    # Per group: pages by page index (ABSENT: the window has passed the page), or the one live state slot.
    units: list[list[int]] = field(default_factory=list)
    host: list[list[int]] = field(default_factory=list)  # like `units`, on the host; empty unless swapped out
    num_inserted: int = 0  # leading pages that were inserted into the tree
    snapshots: list[Snapshot] = field(default_factory=list)
    # Per state group: a copy of the live state from before the drafts of the step in flight; empty without drafts.
    backup: dict[int, int] = field(default_factory=dict)
    has_moved: bool = False  # the live slots are others than the row's page tables say, after rejected drafts
    claimed: list[bytes] = field(default_factory=list)  # keys of the pages that this request computes
    fork_point: int = 0  # length at which the prompt leaves cached prefixes, if it is worth a snapshot; 0: none
    was_staged: bool = False  # whether the stores were asked for the prefix
    claims_tail: bool = False  # whether it has claimed its prompt's tail and not computed it yet
    _packed: TokenArray = field(default_factory=lambda: pack_tokens(()))  # the tokens seen so far, packed
    _links: list[bytes] = field(default_factory=list)  # keys of the full links, where pages do not end with links

    @classmethod
    def empty(cls, root: bytes, page_tokens: int, num_groups: int) -> Lease:
        return cls(root, page_tokens, units=[[] for _ in range(num_groups)])

    @classmethod
    def of(cls, request: Request, weights: bytes, page_tokens: int, num_groups: int) -> Lease:
        """Return the empty lease of a request that runs on this version of the weights."""
        root = root_key(weights, (request.adapter or "").encode(), request.salt)
        return cls.empty(root, page_tokens, num_groups)

    @property
    def is_empty(self) -> bool:
        return not any(self.units)

    def pack(self, tokens: list[int]) -> TokenArray:
        """Return all tokens as 32-bit integers, packed once because packing takes as long as hashing. The array is
        shared and grows: a caller that keeps it makes a copy."""
        if len(self._packed) < len(tokens):
            self._packed += pack_tokens(tokens[len(self._packed) :])
        return self._packed

    def pages(self, tokens: list[int], first: int, last: int) -> list[bytes]:
        """Return the tokens of each page in `first` to `last` (exclusive) as bytes."""
        size, width = self.page_tokens, self.page_tokens * TOKEN_BYTES
        data = self.pack(tokens)[first * size : last * size].tobytes()
        return [data[begin : begin + width] for begin in range(0, len(data), width)]

    def extend_keys(self, tokens: list[int], num_pages: int, tree: PrefixTree | None = None) -> None:
        """Extend `keys` to `num_pages` pages; existing keys are final. A page that is in `tree` takes its key from
        there: finding a node by its tokens takes a fifth of the time of a hash."""
        first, last = len(self.keys), min(num_pages, len(tokens) // self.page_tokens)
        if first >= last:
            return
        if self.page_tokens % LINK_TOKENS:
            self._extend_uneven(tokens, first, last)
            return
        parent = self.keys[-1] if self.keys else self.root
        node = None if tree is None else tree.find(parent)
        for page in () if node is None else self.pages(tokens, first, last):
            node = None if node is None else node.children.get(page)
            if node is None:
                break
            self.keys.append(node.key)
        first = len(self.keys)
        if first < last:
            size, parent = self.page_tokens, self.keys[-1] if self.keys else self.root
            links = link_keys(parent, self.pack(tokens)[first * size : last * size].tobytes())
            per_page = size // LINK_TOKENS
            self.keys += links[per_page - 1 :: per_page]

    def _extend_uneven(self, tokens: list[int], first: int, last: int) -> None:
        """Extend `keys` where a page may end inside a link: its key covers the link's tokens up to there."""
        data, links = self.pack(tokens), self._links
        for end in range((first + 1) * self.page_tokens, (last + 1) * self.page_tokens, self.page_tokens):
            num_links = (end - 1) // LINK_TOKENS
            for index in range(len(links), num_links):
                link = data[index * LINK_TOKENS : (index + 1) * LINK_TOKENS].tobytes()
                links.append(link_key(links[-1] if links else self.root, link))
            parent = links[num_links - 1] if num_links else self.root
            self.keys.append(link_key(parent, data[num_links * LINK_TOKENS : end].tobytes()))


def lease_of(request: Request) -> Lease:
    """Return the lease of a request that has been queued."""
    lease = request.lease
    assert isinstance(lease, Lease), "a request gets its lease when it is queued"
    return lease
