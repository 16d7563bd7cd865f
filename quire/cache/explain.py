"""Explains why a prompt hits or misses the prefix cache, and pins prefixes.

Both functions match the tokens as the admission of a request does, without a request. `LLM.explain` and `LLM.pin` call
them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.cache.index import CacheIndex
from quire.cache.lease import lease_of, token_bytes
from quire.cache.tree import Node
from quire.types import Request, SamplingParams
from quire.types.plans import TOKEN_BYTES


@dataclass(slots=True)
class Explanation:
    """How much of a prompt is cached, and why not more."""

    num_tokens: int
    cached_len: int  # tokens that a request would take from the cache now
    diverged_at: int | None  # first token after the longest cached prefix; None: all of them are known
    reason: str
    # Tokens of the prefix that each tier and those above it hold, the device first.
    tiers: dict[str, int] = field(default_factory=dict)


def explain(index: CacheIndex, tokens: list[int], salt: bytes = b"") -> Explanation:
    """Compare a prompt with the cached prefixes of the same salt."""
    found = _explain_device(index, tokens, salt)
    found.tiers = dict(index.reach(_probe(index, tokens, salt)))
    return found


def _explain_device(index: CacheIndex, tokens: list[int], salt: bytes) -> Explanation:
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
    """Pin (or unpin) the cached prefix of these tokens, so that it is evicted last. Returns its length in tokens."""
    match = index.match(_probe(index, tokens, salt), limit=len(tokens))
    if match.nodes:
        index.tree.pin(match.nodes[-1], 1 if pinned else -1)
        for node in match.nodes:
            index.tree.update_evictable(node, lambda group, unit: index.pools[group].refs(unit) == 1)
    return match.length


def _probe(index: CacheIndex, tokens: list[int], salt: bytes) -> Request:
    request = Request("probe", list(tokens), len(tokens), SamplingParams(), len(tokens) + 1, salt=salt)
    request.lease = index.empty_lease(request)
    return request
