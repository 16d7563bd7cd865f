"""Records which running request computes which page, so that no page is computed twice at the same time.

A running request claims the pages of its prompt. A request that needs one of them is held until the page is in the
prefix tree (n samples of one prompt, or two clients with equal prompts). The last page of a prompt is usually not full
and never enters the tree; it is claimed as the prompt's tail, and requests with the same prompt copy it.
"""

from __future__ import annotations

from quire.cache.chain import link_key
from quire.cache.lease import lease_of, token_bytes
from quire.types import Request


class Claims:
    """The claimed pages and tails of running requests, by page key."""

    def __init__(self, page_tokens: int):
        self._page_tokens = page_tokens
        self._owners: dict[bytes, Request] = {}

    def tail_start(self, request: Request) -> int:
        """Return where the prompt's last page begins: earlier pages can be shared, the last token is not."""
        return (request.prompt_len - 1) // self._page_tokens * self._page_tokens

    def announce(self, request: Request) -> None:
        """Claim the pages that are not in the tree and the tail, except those that another request has claimed."""
        lease = lease_of(request)
        last = self.tail_start(request) // self._page_tokens
        lease.extend_keys(request.tokens, last)
        for key in [*lease.keys[lease.num_inserted : last], self._tail_key(request)]:
            if key not in self._owners:
                self._owners[key] = request
                lease.claimed.append(key)
        lease.claims_tail = self._owners[self._tail_key(request)] is request

    def wait_for(self, request: Request, matched: int) -> bytes | None:
        """Return the key of this prompt's last page beyond `matched` tokens that a running request will compute."""
        lease = lease_of(request)
        last = self.tail_start(request) // self._page_tokens
        lease.extend_keys(request.tokens, last)
        found: bytes | None = None
        for key in lease.keys[matched // self._page_tokens : last]:
            if key not in self._owners:
                return found
            found = key
        tail = self._tail_key(request)
        owner = self._owners.get(tail)
        if owner is not None and owner.computed < request.prompt_len - 1:
            return tail
        return found

    def tail_owner(self, request: Request) -> Request | None:
        return self._owners.get(self._tail_key(request))

    def complete(self, request: Request, keys: list[bytes]) -> list[bytes]:
        """Remove the claims of pages that are in the tree now; return their keys, for which requests may be held."""
        done = [key for key in keys if self._owners.get(key) is request]
        for key in done:
            del self._owners[key]
        return done

    def withdraw(self, request: Request) -> list[bytes]:
        """Remove all claims of a request that no longer runs. Requests held for the returned keys must match again."""
        lease = lease_of(request)
        dropped = [key for key in lease.claimed if self._owners.get(key) is request]
        for key in dropped:
            del self._owners[key]
        lease.claimed.clear()
        return dropped

    def complete_tail(self, request: Request) -> list[bytes]:
        """Return the key of this request's claimed tail, once, when its prompt has been computed."""
        lease = lease_of(request)
        if not lease.claims_tail or request.computed < request.prompt_len - 1:
            return []
        lease.claims_tail = False
        return [self._tail_key(request)]

    def _tail_key(self, request: Request) -> bytes:
        lease = lease_of(request)
        start = self.tail_start(request)
        index = start // self._page_tokens
        lease.extend_keys(request.tokens, index)
        parent = lease.keys[index - 1] if index else lease.root
        return link_key(parent, b"tail" + token_bytes(request.tokens[start : request.prompt_len]))
