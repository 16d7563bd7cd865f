"""Authentication and rate limits: keys compared in constant time, and a budget of requests and tokens per key.

The gate checks both before a request reaches a route; routes report the tokens that a request used.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quire.server.http.errors import ApiError

MAX_BUDGETS = 4096  # callers with a budget; the least recently seen is evicted


class KeyRing:
    """A set of accepted keys, stored as digests."""

    def __init__(self, keys: str | None):
        names = [key.strip() for key in (keys or "").split(",")]
        self._digests = [_digest(key) for key in names if key]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def opens(self, key: str | None) -> bool:
        """Whether `key` is accepted. Every key is compared, so that the time reveals nothing."""
        digest = _digest(key or "")
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def tenant_of(key: str) -> bytes:
    """The tenant id of a key, from which the key can't be recovered."""
    return hashlib.blake2b(_digest(key), digest_size=16, person=b"quire tenant").digest()


def owner_of_key(key: str | None) -> str:
    """The owner id under which a key's responses are stored."""
    return _digest(key or "").hex()


def key_of(headers: Mapping[str, str]) -> str | None:
    """The key in the headers: OpenAI's clients send a bearer token, Anthropic's send `x-api-key`. Only the gate calls
    it; other code reads the caller from the request's state."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    plain = headers.get("x-api-key")
    if bearer and plain is not None and plain != bearer:
        message = "Authorization and X-Api-Key hold different keys. Send one of them."
        raise ApiError(400, "invalid_header", message)
    return bearer or plain


@dataclass(slots=True)
class Bucket:
    """A token bucket that refills to `size` within a minute. It may go negative: a request's tokens are known at its
    end only."""

    size: float
    level: float
    at: float

    def refill(self, now: float) -> None:
        self.level = min(self.size, self.level + (now - self.at) * self.size / 60)
        self.at = now

    def seconds_until(self, level: float) -> float:
        return max(0.0, (level - self.level) * 60 / self.size)


@dataclass(slots=True)
class RateBudget:
    """One caller's buckets by unit, "requests" and "tokens"."""

    buckets: dict[str, Bucket]
    clock: Callable[[], float]

    def headers(self) -> dict[str, str]:
        shown = {}
        for name, bucket in self.buckets.items():
            bucket.refill(self.clock())
            shown[f"x-ratelimit-limit-{name}"] = str(int(bucket.size))
            shown[f"x-ratelimit-remaining-{name}"] = str(max(0, int(bucket.level)))
            shown[f"x-ratelimit-reset-{name}"] = f"{bucket.seconds_until(bucket.size):.3f}s"
        return shown

    def take_request(self) -> None:
        for name, bucket in self.buckets.items():
            bucket.refill(self.clock())
            if bucket.level < 1:
                wait = max(1, math.ceil(bucket.seconds_until(1)))
                message = f"The limit of {int(bucket.size)} {name} a minute is reached. Try again in {wait} s."
                raise ApiError(429, "rate_limited", message, headers={"retry-after": str(wait), **self.headers()})
        if "requests" in self.buckets:
            self.buckets["requests"].level -= 1

    def take_tokens(self, count: int) -> None:
        if "tokens" in self.buckets:
            self.buckets["tokens"].refill(self.clock())
            self.buckets["tokens"].level -= count


class RateLimits:
    """The budgets of all callers, with the limits of a minute."""

    def __init__(self, requests: int | None, tokens: int | None, clock: Callable[[], float] = time.monotonic):
        self._sizes = {name: size for name, size in (("requests", requests), ("tokens", tokens)) if size is not None}
        self._clock = clock
        self._budgets: OrderedDict[str, RateBudget] = OrderedDict()

    @property
    def active(self) -> bool:
        return bool(self._sizes)

    def budget(self, caller: str) -> RateBudget:
        name = _digest(caller).hex()
        if name not in self._budgets:
            now = self._clock()
            buckets = {what: Bucket(size, size, now) for what, size in self._sizes.items()}
            self._budgets[name] = RateBudget(buckets, self._clock)
            if len(self._budgets) > MAX_BUDGETS:
                self._budgets.popitem(last=False)
        self._budgets.move_to_end(name)
        return self._budgets[name]
