"""Speculation over HTTP, on the real engine with a tiny model: fields of requests, usage, and what the server shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import Started
from tests.e2e.test_operation import client_of, until

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "why is the sky blue? zebras jump over 12345 lazy dogs"}]
BODY = {"messages": MESSAGES, "temperature": 0.9, "seed": 4, "max_tokens": 48, "ignore_eos": True}


@pytest.fixture
def client(tiny: Started) -> Iterator[Any]:
    with client_of(tiny) as client:
        yield client


def details(usage: dict[str, Any]) -> tuple[int, int]:
    found = usage["completion_tokens_details"]
    return found["accepted_prediction_tokens"], found["rejected_prediction_tokens"]


def drafted(client: Any) -> int:
    """Guesses that were made from predictions, verified or not: whether they are is a matter of time."""
    found = client.get("/v1/stats").json()["engine"]["speculation"]["proposers"]["prediction"]
    return sum(found["drafted"])


def test_a_prediction_and_a_request_without_drafts_get_the_same_answer(client: Any) -> None:
    plain = client.post(PATH, json={**BODY, "speculate": False}).json()
    assert details(plain["usage"]) == (0, 0)
    text, before = plain["choices"][0]["message"]["content"], drafted(client)
    predicted = client.post(PATH, json={**BODY, "prediction": {"type": "content", "content": text}}).json()
    assert predicted["choices"][0]["message"]["content"] == text
    accepted, rejected = details(predicted["usage"])
    assert accepted >= 0 and rejected >= 0 and accepted < predicted["usage"]["completion_tokens"]
    until(lambda: drafted(client) > before)  # the engine tells now and then
    parts = [{"type": "text", "text": text[:10]}, {"type": "text", "text": text[10:]}]
    body = {**BODY, "prediction": {"type": "content", "content": parts}, "stream": True}
    with client.stream("POST", PATH, json={**body, "stream_options": {"include_usage": True}}) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]) == text
    assert min(details(chunks[-1]["usage"])) >= 0


def test_it_is_seen_in_stats_and_metrics(client: Any) -> None:
    before = drafted(client)
    client.post(PATH, json={**BODY, "prediction": {"type": "content", "content": "the sky is blue"}})
    until(lambda: drafted(client) > before)
    found = client.get("/v1/stats").json()["engine"]["speculation"]
    assert {"grammar", "prediction", "suffix"} <= set(found["proposers"])
    assert set(found["proposers"]["suffix"]) >= {"drafted", "right", "verified", "accepted", "failed"}
    assert found["speedup"] > 0 and found["audit_share"] <= 0.005
    text = client.get("/metrics").text
    assert re.search(r'quire_engine_drafted_tokens_total\{[^}]*position="1",proposer="prediction"\} [1-9]', text)
    for name in ("right_tokens", "verified_tokens", "accepted_tokens", "proposer_failures", "audits"):
        assert f"# TYPE quire_engine_{name}_total counter" in text, name
    assert "quire_engine_speculation_ratio{" in text and "quire_engine_audit_share{" in text


def test_bad_fields_are_refused_in_one_line(client: Any) -> None:
    for fields in (
        {"prediction": {"type": "content", "content": "long " * 3000}},
        {"prediction": {"type": "thought", "content": "x"}},
        {"prediction": "x"},
        {"speculate": "sometimes"},
    ):
        reply = client.post(PATH, json={**BODY, **fields})
        error = reply.json()["error"]
        assert reply.status_code == 400 and "\n" not in error["message"], fields
        assert (error["param"] or "").startswith(next(iter(fields))), error
