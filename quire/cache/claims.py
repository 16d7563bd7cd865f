"""Prompts being computed right now: who computes which page, so that nobody computes it a second time.

A running request announces the pages of its prompt. Another that needs one of them waits until it arrives (n samples
of one prompt, or two clients asking the same thing at once). The last page of a prompt is usually not full and never
enters the tree; it is announced as the prompt's tail, to be copied by requests with the very same prompt.
"""

from __future__ import annotations

from quire.cache.lease import lease_of, token_bytes
from quire.cache.tree import page_key
from quire.types import Request


class Claims:
    def __init__(self, page_tokens: int):
        self._page_tokens = page_tokens
        self._owners: dict[bytes, Request] = {}

    def tail_start(self, request: Request) -> int:
        """Where the prompt's last page begins: what is before it can be shared, its last token is always computed."""
        return (request.prompt_len - 1) // self._page_tokens * self._page_tokens

    def announce(self, request: Request) -> None:
        """Claim what nobody else is computing: the pages after `computed`, and the tail."""
        lease = lease_of(request)
        last = self.tail_start(request) // self._page_tokens
        lease.extend_keys(request.tokens, last)
        for key in [*lease.keys[request.computed // self._page_tokens : last], self._tail_key(request)]:
            if key not in self._owners:
                self._owners[key] = request
                lease.claimed.append(key)
        lease.claims_tail = self._owners[self._tail_key(request)] is request

    def wait_for(self, request: Request, matched: int) -> bytes | None:
        """The furthest page of this prompt, beyond `matched` tokens, that a running request is about to compute."""
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
        """These pages are in the tree now: those who waited for them can go on."""
        done = [key for key in keys if self._owners.get(key) is request]
        for key in done:
            del self._owners[key]
        return done

    def withdraw(self, request: Request) -> list[bytes]:
        """The request stopped computing; whoever waited for these keys must look again."""
        lease = lease_of(request)
        dropped = [key for key in lease.claimed if self._owners.get(key) is request]
        for key in dropped:
            del self._owners[key]
        lease.claimed.clear()
        return dropped

    def complete_tail(self, request: Request) -> list[bytes]:
        """The key of the tail this request leads, the first time its prompt is computed."""
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
        return page_key(parent, b"tail" + token_bytes(request.tokens[start : request.prompt_len]))
