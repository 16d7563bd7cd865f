"""Questions people ask of the prefix cache: why was this not a hit, and please keep that one.

Both look prompts up the way a request would, without being one. `LLM.explain` and `LLM.pin` call them.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.cache.index import CacheIndex
from quire.cache.lease import TOKEN_BYTES, Lease, lease_of, token_bytes
from quire.cache.tree import Node
from quire.types import Request, SamplingParams


@dataclass(slots=True)
class Explanation:
    """Why a prompt was or was not served from the cache."""

    num_tokens: int
    cached_len: int  # tokens that would come from the cache now
    diverged_at: int | None  # first token at which it leaves everything that is cached; None: it does not
    reason: str


def explain(index: CacheIndex, tokens: list[int], salt: bytes = b"") -> Explanation:
    """Where a prompt leaves what is cached."""
    size = index.page_tokens
    request = _probe(index, tokens, salt)
    lease = lease_of(request)
    cached = index.match(request).length
    lease.extend_keys(tokens, len(tokens) // size)
    node: Node | None = None
    known = 0
    for key in lease.keys:
        found = index.tree.get(key)
        if found is None:
            break
        node, known = found, known + 1
    start = known * size
    tail = token_bytes(tokens[start : start + size])
    diverged = start + index.tree.diverging_child(lease.root, node, tail, TOKEN_BYTES)
    if cached >= len(tokens) - size and cached > 0:
        return Explanation(len(tokens), cached, None if diverged >= len(tokens) else diverged, "cached")
    if not index.prefix_cache:
        return Explanation(len(tokens), 0, 0, "the prefix cache is switched off")
    if diverged == 0:
        return Explanation(len(tokens), 0, 0, "nothing cached begins like this")
    if diverged >= len(tokens):
        return Explanation(len(tokens), cached, None, "known, but part of it was evicted or not yet computed")
    return Explanation(len(tokens), cached, diverged, f"diverged at token {diverged}")


def pin(index: CacheIndex, tokens: list[int], salt: bytes = b"", *, pinned: bool = True) -> int:
    """Soft-pin (or unpin) the cached part of these tokens: it is evicted last. Returns how many tokens that is."""
    match = index.match(_probe(index, tokens, salt), limit=len(tokens))
    if match.nodes:
        index.tree.pin(match.nodes[-1], 1 if pinned else -1)
        for node in match.nodes:
            index.tree.update_evictable(node, lambda group, unit: index.pools[group].refs(unit) == 1)
    return match.length


def _probe(index: CacheIndex, tokens: list[int], salt: bytes) -> Request:
    request = Request("probe", list(tokens), len(tokens), SamplingParams(), len(tokens) + 1, salt=salt)
    request.lease = Lease.empty(salt, index.page_tokens, len(index.specs))
    return request
