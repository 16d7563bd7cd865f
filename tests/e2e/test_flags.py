"""Flags of `quire serve` that bound or keep something, each seen to do what its help says. Those that other tests start
their servers with (keys, queue, rates, keep-alive, names, logs, engine restarts) are shown there."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import KEY, ROOT, Started, start, stub_command
from tests.e2e.test_operation import CHAT, COMPLETE, LONG, client_of, events_of, until

OTHER_KEY = "sk-other"
HELLO = {"messages": [{"role": "user", "content": "word " * 100}], "max_tokens": 2}


@pytest.fixture(scope="module")
def bounded(model_here: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Started, list[str]]]:
    """A server with small bounds, and the flags it was started with."""
    store = tmp_path_factory.mktemp("store") / "responses.db"
    flags = ["--request-timeout", "1.5", "--max-schema", "100", "--response-store", str(store), "--max-stored", "2",
             "--api-key", f"{KEY},{OTHER_KEY}", "--share-prefixes", "--log-level", "error"]  # fmt: skip
    started = start(stub_command(*flags), {"STUB_STEP_SECONDS": "0.01"})
    yield started, flags
    started.stop()


def test_request_timeout_bounds_what_a_client_asks_for(bounded: tuple[Started, list[str]]) -> None:
    with client_of(bounded[0]) as client:
        for timeout in ({}, {"timeout": 60}):
            reply = client.post(COMPLETE, json={**LONG, **timeout})
            assert reply.status_code == 504 and reply.json()["error"]["code"] == "deadline_exceeded"


def test_max_schema(bounded: tuple[Started, list[str]]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "title": "x" * 100}}}
    with client_of(bounded[0]) as client:
        for fields in (
            {"structured_outputs": {"regex": "a" * 101}},
            {"structured_outputs": {"grammar": "start: " + "a" * 101}},
            {"structured_outputs": {"json": {"title": "x" * 100}}},
            {"tools": [tool]},
        ):
            reply = client.post(CHAT, json={**HELLO, **fields})
            assert reply.status_code == 400 and reply.json()["error"]["code"] == "schema_too_large", reply.text


def test_share_prefixes(bounded: tuple[Started, list[str]]) -> None:
    """Without it keys are kept apart: `test_one_tenant_can_not_time_what_another_asked`."""
    with client_of(bounded[0]) as client:
        client.post(CHAT, json=HELLO)
        usage = client.post(CHAT, json=HELLO, headers={"authorization": f"Bearer {OTHER_KEY}"}).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 50


def test_log_level(bounded: tuple[Started, list[str]]) -> None:
    with client_of(bounded[0]) as client:
        assert client.get("/v1/models").status_code == 200
    assert not any(" info " in line for line in bounded[0].lines)


def test_stored_responses_outlive_the_server_the_newest_of_them(bounded: tuple[Started, list[str]]) -> None:
    with client_of(bounded[0]) as client:
        ids = [client.post("/v1/responses", json={"input": f"number {i}"}).json()["id"] for i in range(3)]
    again = start(stub_command(*bounded[1]))
    try:
        with client_of(again) as client:
            assert [client.get(f"/v1/responses/{one}").status_code for one in ids] == [404, 200, 200]
            theirs = {"authorization": f"Bearer {OTHER_KEY}"}
            assert client.get(f"/v1/responses/{ids[2]}", headers=theirs).status_code == 404, "each key has its own"
            body = {"input": "and on", "previous_response_id": ids[2]}
            assert client.post("/v1/responses", json=body).status_code == 200
    finally:
        again.stop()


def test_drain_timeout_ends_what_takes_too_long(model_here: None) -> None:
    started = start(stub_command("--drain-timeout", "0.3"), {"STUB_STEP_SECONDS": "0.01"})
    with client_of(started) as client, client.stream("POST", COMPLETE, json={**LONG, "stream": True}) as stream:
        events: Iterator[dict[str, Any]] = events_of(stream.iter_lines())
        next(events)
        started.process.send_signal(signal.SIGTERM)
        assert started.process.wait(20) == 0
        until(lambda: any("drain timed out" in line for line in started.lines))


def test_start_timeout(model_here: None) -> None:
    """An engine that does not get ready is given up, and that is said."""
    env = {**os.environ, "STUB_START_SECONDS": "30"}
    command = stub_command("--start-timeout", "1")
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=60)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 1 and "not ready after 1 s" in lines[-1] and "Traceback" not in done.stderr, done.stderr
