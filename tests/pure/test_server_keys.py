"""Keys and budgets of callers."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette")

from quire.server.http.errors import ApiError
from quire.server.http.keys import KeyRing, RateLimits, key_of


def test_keys() -> None:
    assert not KeyRing(None) and not KeyRing(" , ")
    ring = KeyRing("one, two")
    assert ring.opens("one") and ring.opens("two")
    assert not any(ring.opens(key) for key in ("one, two", "", None, "ONE", "on"))
    assert not KeyRing(None).opens(""), "no key is no key, not the empty one"


def test_where_a_key_may_stand() -> None:
    assert key_of({"authorization": "Bearer abc"}) == key_of({"authorization": "bearer  abc "}) == "abc"
    assert key_of({"x-api-key": "abc"}) == "abc"
    assert key_of({"authorization": "Basic abc"}) is None and key_of({}) is None


def make_limits(requests: int | None, tokens: int | None) -> tuple[RateLimits, list[float]]:
    now = [100.0]
    return RateLimits(requests, tokens, clock=lambda: now[0]), now


def test_requests_a_minute() -> None:
    limits, now = make_limits(3, None)
    budget = limits.budget("me")
    for left in (2, 1, 0):
        budget.take_request()
        assert budget.headers()["x-ratelimit-remaining-requests"] == str(left)
    with pytest.raises(ApiError) as caught:
        budget.take_request()
    assert caught.value.status == 429 and caught.value.headers["retry-after"] == "20"
    limits.budget("somebody else").take_request()
    now[0] += 20
    budget.take_request()
    now[0] += 1000
    assert budget.headers()["x-ratelimit-remaining-requests"] == "3"


def test_tokens_are_taken_when_they_are_known() -> None:
    limits, now = make_limits(None, 60)
    budget = limits.budget("me")
    budget.take_request()
    budget.take_tokens(100)
    assert budget.headers()["x-ratelimit-remaining-tokens"] == "0"
    with pytest.raises(ApiError, match="60 tokens a minute"):
        budget.take_request()
    now[0] += 41
    budget.take_request()


def test_without_limits_there_are_none() -> None:
    limits, _ = make_limits(None, None)
    assert not limits.active and limits.budget("me").headers() == {}
