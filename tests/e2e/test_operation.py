"""What operators rely on: probes, metrics, limits, deadlines, hang-ups, draining, and an engine that dies."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import KEY, ROOT, Started, need, start, stub_command

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
LONG = {"prompt": "one two three", "max_tokens": 4000}


@pytest.fixture(scope="module")
def slow(model_here: None) -> Iterator[Started]:
    """Two rows, two places in the queue, and steps that take a while."""
    flags = ("--max-rows", "2", "--max-waiting", "2", "--keep-alive", "0.1", "--api-key", KEY, "--log-form", "json",
             "--cors-origins", "https://page.example")  # fmt: skip
    started = start(stub_command(*flags), {"STUB_STEP_SECONDS": "0.01"})
    yield started
    started.stop()


def client_of(started: Started) -> Any:
    need("httpx")
    import httpx

    return httpx.Client(base_url=started.url, headers={"authorization": f"Bearer {KEY}"}, timeout=30)


def until(happened: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for something that is told to another process; only a hang makes this fail."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def engine(client: Any) -> dict[str, Any]:
    return client.get("/v1/stats").json()["engine"]


@contextmanager
def held(pid: int) -> Iterator[None]:
    """The engine stands still: what is open stays open, however long we take."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def is_idle(client: Any) -> bool:
    stats = engine(client)
    pages = stats["groups"][0]
    return stats["running"] == stats["waiting"] == 0 and pages["available"] == pages["units"]


def events_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def test_probes_and_metrics(slow: Started) -> None:
    with client_of(slow) as client:
        for probe in ("/healthz", "/readyz"):
            reply = client.get(probe)
            assert reply.status_code == 200 and reply.json()["status"] == "ok"
        assert client.post(CHAT, json={"messages": [{"role": "user", "content": "count me"}]}).status_code == 200
        client.get("/nothing/here")
        text = client.get("/metrics").text
        route = f'route="{CHAT}"'
        for line in (
            f"quire_ttft_seconds_count{{{route}}} ",
            f"quire_tpot_seconds_count{{{route}}} ",
            f"quire_e2e_seconds_count{{{route}}} ",
            f"quire_queue_seconds_count{{{route}}} ",
            f'quire_http_replies_total{{method="POST",{route},status="200"}} ',
            'quire_failures_total{code="unknown_route",route="other"} ',
            'quire_engine_running{engine="0"} ',
            'quire_engine_waiting{engine="0"} ',
            'quire_engine_batch_tokens{engine="0"} ',
            'quire_engine_hit_tokens_total{engine="0"} ',
            'quire_engine_preemptions_total{engine="0"} ',
            'quire_engine_cache_available{engine="0",group="full"} ',
        ):
            assert line in text, line


def test_every_route_stands_in_the_docs(slow: Started) -> None:
    text = (ROOT / "docs" / "server.md").read_text()
    with client_of(slow) as client:
        routes = client.get("/openapi.json").json()["paths"]
    missing = [path for path in routes if re.sub(r"\{(\w+?)(:path)?\}", r"{\1}", path) not in text]
    assert not missing, missing


def test_hanging_up_cancels_a_stream(slow: Started) -> None:
    with client_of(slow) as client:
        with client.stream("POST", COMPLETE, json={**LONG, "stream": True}) as reply:
            next(events_of(reply.iter_lines()))
        until(lambda: is_idle(client))


def test_hanging_up_cancels_a_reply_that_is_not_streamed(slow: Started) -> None:
    host, port = slow.url.removeprefix("http://").split(":")
    data = json.dumps(LONG).encode()
    head = f"POST {COMPLETE} HTTP/1.1\r\nHost: x\r\nX-Api-Key: {KEY}\r\nContent-Type: application/json\r\n"
    with client_of(slow) as client:
        until(lambda: is_idle(client))
        before = engine(client)["ended"]
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            until(lambda: engine(client)["running"] == 1)
        until(lambda: is_idle(client) and engine(client)["ended"] > before)


def test_a_full_queue_answers_429_and_idle_streams_get_signs_of_life(slow: Started) -> None:
    with client_of(slow) as client:
        never = client.post(COMPLETE, json={**LONG, "n": 5})  # two rows, and two may wait: no use in coming back
        assert never.status_code == 400 and "n=5 is more than the 4 samples" in never.json()["error"]["message"]
        streams = [client.stream("POST", COMPLETE, json={**LONG, "stream": True}) for _ in range(4)]
        replies = [stream.__enter__() for stream in streams[:2]]
        try:
            until(lambda: engine(client)["running"] == 2)  # only then is there room for two who wait
            replies += [stream.__enter__() for stream in streams[2:]]
            refused = client.post(COMPLETE, json=LONG)
            assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
            assert int(refused.headers["retry-after"]) >= 1
            assert replies[3].status_code == 200
            assert next(line for line in replies[3].iter_lines() if line) == ": keep-alive"
        finally:
            for stream in streams:
                stream.__exit__(None, None, None)
        until(lambda: is_idle(client))


def test_deadlines(slow: Started) -> None:
    with client_of(slow) as client:
        reply = client.post(COMPLETE, json={**LONG, "timeout": 0.2})
        assert reply.status_code == 504 and reply.json()["error"]["code"] == "deadline_exceeded"
        with client.stream("POST", COMPLETE, json={**LONG, "timeout": 0.2, "stream": True}) as stream:
            last = list(events_of(stream.iter_lines()))[-1]
        assert last["error"]["code"] == "deadline_exceeded", "in mid-stream an error is an event"
        message = {"model": None, "max_tokens": 4000, "messages": [{"role": "user", "content": "word " * 900}]}
        with client.stream("POST", "/v1/messages", json={**message, "timeout": 0.2, "stream": True}) as stream:
            assert list(events_of(stream.iter_lines()))[-1]["error"]["type"] == "timeout_error"
        with client.stream("POST", "/v1/chat/completions", json={**message, "timeout": 0.2, "stream": True}) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert json.loads(lines[-2][6:])["error"]["code"] == "deadline_exceeded" and lines[-1] == "data: [DONE]"
        # Time enough for a first word: without one there is no item that could be incomplete.
        response = {"input": "word " * 900, "max_output_tokens": 4000, "timeout": 2, "stream": True}
        with client.stream("POST", "/v1/responses", json=response) as stream:
            last = list(events_of(stream.iter_lines()))[-1]
        assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "deadline_exceeded"
        assert [item["status"] for item in last["response"]["output"]] == ["incomplete"]
        until(lambda: is_idle(client))


def test_a_stream_that_breaks_is_logged_and_counted_as_what_it_was(slow: Started) -> None:
    def line_of(name: str) -> dict[str, Any]:
        until(lambda: any(name in line for line in slow.lines))
        return next(json.loads(line) for line in slow.lines if name in line)

    with client_of(slow) as client:
        body = {**LONG, "stream": True}
        with client.stream(
            "POST", COMPLETE, json={**body, "timeout": 0.2}, headers={"x-request-id": "too-late"}
        ) as one:
            one.read()
        with client.stream("POST", COMPLETE, json=body, headers={"x-request-id": "walks-out"}) as other:
            next(events_of(other.iter_lines()))
        with client.stream(
            "POST", COMPLETE, json={**body, "max_tokens": 2}, headers={"x-request-id": "stays"}
        ) as third:
            third.read()
        assert (line_of("too-late")["status"], line_of("too-late")["outcome"]) == (200, "deadline_exceeded")
        assert (line_of("walks-out")["status"], line_of("walks-out")["outcome"]) == (200, "disconnected")
        assert "outcome" not in line_of("stays")
        assert all(line_of(name)["prompt_tokens"] == 3 for name in ("too-late", "walks-out", "stays"))
        assert line_of("walks-out")["completion_tokens"] >= 1, "what it took counts, also for the key's budget"
        text = client.get("/metrics").text
        for outcome in ("deadline_exceeded", "disconnected"):
            assert f'quire_streams_broken_total{{outcome="{outcome}",route="{COMPLETE}"}} ' in text
        until(lambda: is_idle(client))


def test_the_queue_is_bounded_in_tokens_too(model_here: None) -> None:
    flags = ("--max-rows", "1", "--max-waiting-tokens", "100", "--api-key", KEY)
    started = start(stub_command(*flags), {"STUB_STEP_SECONDS": "0.01"})
    try:
        with client_of(started) as client:
            bodies = [{**LONG, "stream": True}, {**LONG, "prompt": "word " * 60, "stream": True}]
            streams = [client.stream("POST", COMPLETE, json=body) for body in bodies]
            replies = [stream.__enter__() for stream in streams]  # one runs, and 60 tokens wait
            try:
                assert [reply.status_code for reply in replies] == [200, 200]
                until(lambda: engine(client)["waiting"] == 1)
                many = {"prompt": "word " * 50, "max_tokens": 2}
                refused = client.post(COMPLETE, json=many)
                assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
                assert "prompt tokens wait already, 100 is" in refused.json()["error"]["message"]
                assert int(refused.headers["retry-after"]) >= 1 and refused.headers["x-request-id"]
                claude = {"max_tokens": 2, "messages": [{"role": "user", "content": "word " * 50}]}
                refused = client.post("/v1/messages", json=claude)
                assert refused.status_code == 429 and refused.json()["error"]["type"] == "rate_limit_error"
                assert int(refused.headers["retry-after"]) >= 1
                few = client.stream("POST", COMPLETE, json={"prompt": "word", "max_tokens": 2, "stream": True})
                assert few.__enter__().status_code == 200, "a small one still fits"
                streams.append(few)
            finally:
                for stream in streams:
                    stream.__exit__(None, None, None)
            until(lambda: is_idle(client))
            assert client.post(COMPLETE, json=many).status_code == 200
            assert client.post(COMPLETE, json={**many, "prompt": "word " * 500}).status_code == 200, (
                "alone it may be long"
            )
    finally:
        started.stop()


def test_cors_for_the_origins_that_were_named(slow: Started) -> None:
    with client_of(slow) as client:
        origin = {"origin": "https://page.example"}
        assert client.get("/healthz", headers=origin).headers["access-control-allow-origin"] == origin["origin"]
        reply = client.options(CHAT, headers={**origin, "access-control-request-method": "POST"})
        assert reply.status_code == 204 and "authorization" in reply.headers["access-control-allow-headers"]
        asking = {**origin, "access-control-request-method": "POST",
                  "access-control-request-headers": "authorization,x-stainless-lang"}  # fmt: skip
        assert "x-stainless-lang" in client.options(CHAT, headers=asking).headers["access-control-allow-headers"], (
            "the SDKs say what they are in headers of their own"
        )
        asking["access-control-request-headers"] = "a: b"
        assert client.options(CHAT, headers=asking).headers["access-control-allow-headers"].startswith("authorization")
        shown = client.get("/healthz", headers=origin).headers["access-control-expose-headers"]
        assert {"x-request-id", "retry-after", "x-ratelimit-remaining-tokens"} <= set(shown.split(", "))
        other = client.get("/healthz", headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


def test_log_lines_carry_the_request_id(slow: Started) -> None:
    with client_of(slow) as client:
        client.get("/v1/models", headers={"x-request-id": "find-me"})
        until(lambda: any("find-me" in line for line in slow.lines))
        line = next(json.loads(line) for line in slow.lines if "find-me" in line)
        assert line["event"] == "reply" and line["status"] == 200 and line["path"] == "/v1/models"
        client.post(COMPLETE, json={"prompt": "one two", "max_tokens": 3}, headers={"x-request-id": "me-too"})
        until(lambda: any("me-too" in line for line in slow.lines))
        line = next(json.loads(line) for line in slow.lines if "me-too" in line)
        assert (line["prompt_tokens"], line["completion_tokens"]) == (2, 3)


def test_rate_limits(model_here: None) -> None:
    started = start(stub_command("--rate-requests", "3", "--rate-tokens", "1000"))
    try:
        with client_of(started) as client:
            body = {"messages": [{"role": "user", "content": "hi"}]}
            replies = [client.post(CHAT, json=body) for _ in range(4)]
            assert [reply.status_code for reply in replies] == [200, 200, 200, 429]
            assert replies[0].headers["x-ratelimit-limit-requests"] == "3"
            assert replies[0].headers["x-ratelimit-remaining-requests"] == "2"
            assert int(replies[1].headers["x-ratelimit-remaining-tokens"]) < 1000
            assert replies[3].json()["error"]["code"] == "rate_limited" and int(replies[3].headers["retry-after"]) > 1
            assert client.post("/tokenize", json={"prompt": "hi"}).status_code == 429, "that is work too"
            assert client.get("/v1/models").status_code == 200
            assert 'quire_failures_total{code="rate_limited",route="other"} 2.0' in client.get("/metrics").text
    finally:
        started.stop()


def test_sigterm_drains_and_a_second_one_stops_at_once(model_here: None) -> None:
    for signals in (1, 2):
        started = start(stub_command("--admin-key", KEY), {"STUB_STEP_SECONDS": "0.01"})
        with client_of(started) as client, client_of(started) as probe:
            pid = probe.get("/admin/engine").json()["pid"]
            count = 60 if signals == 1 else 4000
            body = {"prompt": "one two", "max_tokens": count, "stream": True}
            with client.stream("POST", COMPLETE, json=body) as stream:
                events = events_of(stream.iter_lines())
                next(events)
                with held(pid):
                    started.process.send_signal(signal.SIGTERM)
                    until(lambda probe=probe: probe.get("/readyz").status_code == 503)
                    assert probe.get("/healthz").status_code == 200
                    refused = probe.post(COMPLETE, json=body)
                    assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
                if signals == 1:
                    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "length"
                else:
                    started.process.send_signal(signal.SIGTERM)
        assert started.process.wait(20) == 0, started.lines


def text_of(events: Iterator[dict[str, Any]]) -> str:
    return "".join(event["choices"][0]["text"] for event in events if event.get("choices"))


def test_an_engine_that_dies_or_hangs_is_replaced_and_streams_go_on(model_here: None, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    flags = ("--admin-key", KEY, "--hang-timeout", "4", "--max-restarts", "2", "--trace", str(trace))
    started = start(stub_command(*flags), {"STUB_STEP_SECONDS": "0.005"})
    try:
        with client_of(started) as client, client_of(started) as other:
            body = {"prompt": "one two three", "max_tokens": 300, "stream": True}
            expected = client.post(COMPLETE, json={**body, "stream": False}).json()["choices"][0]["text"]
            for number, kind in enumerate((signal.SIGKILL, signal.SIGSTOP), start=1):
                pid = other.get("/admin/engine").json()["pid"]
                with client.stream("POST", COMPLETE, json=body) as stream:
                    events = events_of(stream.iter_lines())
                    begin = text_of(iter([next(events), next(events)]))
                    os.kill(pid, kind)
                    assert begin + text_of(events) == expected, "no token twice, none missing"
                state = other.get("/admin/state").json()
                assert state["restarts"] == number and state["process"]["state"] == "ready", state
                assert other.get("/readyz").status_code == 200
            assert other.post("/admin/check").json() == {"ok": True, "problem": None, "requests": 0, "leaked_units": 0}
            codes = [error["code"] for error in other.get("/admin/errors").json()["errors"]]
            assert set(codes) == {"engine_lost", "engine_hung"}
            metrics = other.get("/metrics").text
            assert 'quire_engine_moves_total{engine="0",transition="recovered"} 2.0' in metrics
            # Once the budget is spent the server says so, and why.
            pid = other.get("/admin/engine").json()["pid"]
            with client.stream("POST", COMPLETE, json={**LONG, "stream": True}) as stream:
                events = events_of(stream.iter_lines())
                next(events)
                os.kill(pid, signal.SIGKILL)
                assert list(events)[-1]["error"]["code"] == "engine_lost"
            assert other.get("/healthz").status_code == other.get("/readyz").status_code == 503
            assert "signal 9" in other.get("/readyz").json()["problem"]
            refused = other.post(COMPLETE, json=LONG)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_lost"
            assert refused.headers["retry-after"]
            for route in ("/admin/state", "/admin/errors"):
                assert client.get(route, headers={"authorization": "Bearer wrong"}).status_code == 401
    finally:
        started.stop()
    # The last engine was killed: its last line may be cut off. What the two before it wrote is all there.
    first, *lines, _ = trace.read_text().split("\n")
    events_seen = [json.loads(line.removesuffix(",")) for line in lines]
    lives = [event["pid"] for event in events_seen if event["name"] == "process_name"]
    assert first == "[" and len(lives) == len(set(lives)) == 3
    assert {event["pid"] for event in events_seen if event["name"] == "forward"} >= set(lives[:2])


def test_a_step_that_hangs_shows_in_the_probe(model_here: None) -> None:
    from concurrent.futures import ThreadPoolExecutor

    started = start(stub_command("--stall-timeout", "2"), {"STUB_STEP_SECONDS": "6"})
    try:
        with client_of(started) as client, ThreadPoolExecutor(1) as pool:
            until(lambda: client.get("/healthz").status_code == 200)
            answer = pool.submit(client.post, COMPLETE, json={"prompt": "one", "max_tokens": 1})
            until(lambda: client.get("/healthz").status_code == 503)
            assert "past a step" in client.get("/readyz").json()["problem"]
            assert answer.result().status_code == 200
            until(lambda: client.get("/healthz").status_code == 200)
    finally:
        started.stop()


def test_what_is_wrong_at_the_start_is_one_clear_line(stub: Started) -> None:
    port = stub.url.rpartition(":")[2]
    for flags, code, words in (
        (["no-such-model-anywhere", "--offline"], 2, "no-such-model-anywhere"),
        (["smollm2", "--port", port], 1, f"port {port}"),
        (["smollm2", "--port", "0", "--tool-format", "klingon"], 2, "klingon"),
        (["smollm2", "--port", "99999"], 2, "port"),
    ):
        command = [sys.executable, "-m", "tests.e2e.stub_server", *flags]
        done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=60)
        assert done.returncode == code, done.stderr
        lines = done.stderr.strip().splitlines()
        assert len(lines) == 1 and words in lines[0] and "Traceback" not in done.stderr, done.stderr


def test_a_long_prompt_outlives_kills_from_outside_and_one_that_kills_is_found(model_here: None) -> None:
    """In steps of 32 tokens a prompt of a thousand is under way whenever the signal comes."""
    from concurrent.futures import ThreadPoolExecutor

    flags = ("--admin-key", KEY, "--max-restarts", "9", "--max-batch-tokens", "32", "--max-model-len", "2048")
    started = start(stub_command(*flags), {"STUB_STEP_SECONDS": "0.1"})
    body = {"prompt": "word " * 1000, "max_tokens": 2}

    def kill(client: Any, number: int, count: int) -> None:
        for _ in range(count):
            restarts = client.get("/admin/state").json()["restarts"]
            until(lambda: client.get("/readyz").status_code == 200 and engine(client)["running"] == 1, 60)
            steps = engine(client)["steps"]
            until(lambda steps=steps: engine(client)["steps"] > steps, 60)
            os.kill(client.get("/admin/engine").json()["pid"], number)
            until(lambda restarts=restarts: client.get("/admin/state").json()["restarts"] > restarts, 60)

    try:
        with client_of(started) as client, client_of(started) as other, ThreadPoolExecutor(1) as pool:
            innocent = pool.submit(client.post, COMPLETE, json=body, timeout=120)
            kill(other, signal.SIGKILL, 3)
            assert innocent.result().status_code == 200, innocent.result().text
            body = {**body, "prompt": "other " * 1000}  # of which nothing is cached
            poison = pool.submit(client.post, COMPLETE, json=body, timeout=120)
            kill(other, signal.SIGSEGV, 2)
            assert poison.result().status_code == 500
            assert poison.result().json()["error"]["code"] == "quarantined"
    finally:
        started.stop()
