"""Streams that are cut and resumed: byte for byte what one connection would have read, for their owner only."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import KEY, Started, start, stub_command
from tests.e2e.test_bad_input import check_error
from tests.e2e.test_security import client_of

SEED = int(os.environ.get("TEST_SEED", "0")) or random.randrange(1 << 30)
WORDS = " ".join(f"word{number}" for number in range(60))
USER = {"role": "user", "content": WORDS}
REQUESTS = [
    ("/v1/chat/completions", {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": WORDS, "max_tokens": 60, "stream": True, "n": 2}),
    ("/v1/responses", {"input": WORDS, "stream": True}),
    ("/v1/messages", {"messages": [USER], "max_tokens": 200, "stream": True}),
]
KEEP = {"x-quire-resume": "true"}


@pytest.fixture(scope="module")
def http(stub: Started) -> Iterator[Any]:
    with client_of(stub, KEY) as client:
        yield client


def read_some(reply: Any, count: int) -> bytes:
    """At least so many bytes, then the connection is cut."""
    got = b""
    for part in reply.iter_bytes():
        got += part
        if len(got) >= count:
            break
    return got


def events_in(text: bytes) -> list[bytes]:
    """The complete events. Comments keep a connection alive and are none."""
    return [event for event in text.split(b"\n\n")[:-1] if not event.startswith(b":")]


@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path,body", REQUESTS, ids=[path for path, _ in REQUESTS])
def test_cut_at_random_and_resumed(http: Any, path: str, body: dict[str, Any], rounds: int) -> None:
    print("seed", SEED)
    rng = random.Random(f"{SEED} {path}")
    for _ in range(rounds):
        events: list[bytes] = []
        with http.stream("POST", path, json=body, headers=KEEP) as reply:
            assert reply.status_code == 200
            name = reply.headers["x-quire-stream"]
            events += events_in(read_some(reply, rng.randrange(1, 6000)))
        done = False
        while not done:
            way = rng.randrange(3) if events else 0
            last = {"last-event-id": f"{name}:{len(events) - 1}"}
            if way == 0:
                request = http.stream("GET", f"/v1/streams/{name}?from={len(events)}")
            elif way == 1:
                request = http.stream("GET", f"/v1/streams/{name}", headers=last)
            else:  # the way of browsers' libraries: the same request again
                request = http.stream("POST", path, json=body, headers=last)
            with request as reply:
                assert reply.status_code == 200, reply.read()
                cut = rng.choice([rng.randrange(1, 9000), 1 << 30])
                events += events_in(read_some(reply, cut))
                done = cut == 1 << 30
        assert events == events_in(http.get(f"/v1/streams/{name}").content)
        assert [re.match(rb"id: \S+:(\d+)\n", event)[1] for event in events] == [b"%d" % i for i in range(len(events))]  # type: ignore[index]
        plain = events_in(http.post(path, json=body).content)
        assert len(plain) > 10 and text_of(plain) == text_of(events), "the same text as without resuming"


def text_of(events: list[bytes]) -> str:
    """All text deltas of a stream, of any API."""
    found = []
    for event in events:
        data = event.split(b"data: ", 1)[1]
        value = {} if data == b"[DONE]" else json.loads(data)
        for choice in value.get("choices", ()):
            found.append((choice["index"], choice.get("text") or choice.get("delta", {}).get("content") or ""))
        delta = value.get("delta")
        found.append((0, delta if isinstance(delta, str) else (delta or {}).get("text", "")))
    return "".join(text for _, text in sorted(found, key=lambda one: one[0]))


def test_only_who_asks_and_only_the_owner(http: Any, stub: Started) -> None:
    path, body = REQUESTS[0]
    assert "x-quire-stream" not in http.post(path, json=body).headers
    for wrong in ("yes", "-1", "1e3"):
        check_error(http.post(path, json=body, headers={"x-quire-resume": wrong}), 400, "invalid_header")
    reply = http.post(path, json=body, headers={"x-quire-resume": "60"})
    name = reply.headers["x-quire-stream"]
    assert http.get(f"/v1/streams/{name}").content == reply.content
    check_error(http.get("/v1/streams/strm_0"), 404, "not_found", "stream_id")
    check_error(http.get(f"/v1/streams/{name}?from=-1"), 400, "invalid_value", "from")
    check_error(http.get(f"/v1/streams/{name}", headers={"last-event-id": "x"}), 400, "invalid_header")
    with client_of(stub, "sk-admin") as other:
        check_error(other.get(f"/v1/streams/{name}"), 404, "not_found", "stream_id")
        check_error(other.post(path, json=body, headers={"last-event-id": f"{name}:3"}), 404, "not_found", "stream_id")
    with client_of(stub, None) as nobody:
        assert nobody.get(f"/v1/streams/{name}").status_code == 401


def test_a_stream_is_cancelled_or_not_kept(http: Any, model_here: None) -> None:
    path, body = "/v1/completions", {"prompt": WORDS, "max_tokens": 1900, "stream": True}
    with http.stream("POST", path, json=body, headers=KEEP) as reply:
        name = reply.headers["x-quire-stream"]
        read_some(reply, 100)
    assert http.delete(f"/v1/streams/{name}").json() == {"id": name, "object": "stream", "cancelled": True}
    rest = http.get(f"/v1/streams/{name}").content
    assert b'"code":"cancelled"' in rest or rest.endswith(b"[DONE]\n\n")
    with http.stream("POST", path, json=body, headers={"x-quire-resume": "0"}) as reply:
        name = reply.headers["x-quire-stream"]
    reply = http.get(f"/v1/streams/{name}")
    while reply.status_code == 200:  # until it is noticed that nobody reads
        assert b'"code":"cancelled"' in reply.content or reply.content.endswith(b"[DONE]\n\n")
        reply = http.get(f"/v1/streams/{name}")
    check_error(reply, 404, "not_found", "stream_id")
    never = start(stub_command("--resume-seconds", "0"))
    with client_of(never, None) as client:
        check_error(client.post(path, json=body, headers=KEEP), 400, "unsupported_parameter")
    never.stop()
