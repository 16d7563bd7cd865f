"""The rules of docs/security.md on a running server: tenants, routes, paths, media, templates, ids."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import Started, need, start, stub_command
from tests.e2e.test_operation import events_of, until

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "the quick brown fox jumps over the lazy dog " * 8}], "max_tokens": 2}
OPEN = {"/", "/favicon.ico", "/health", "/healthz", "/ping", "/readyz"}


@pytest.fixture(scope="module")
def keyed(model_here: None) -> Iterator[Started]:
    started = start(stub_command("--api-key", "one,two", "--admin-key", "boss", "--send-timeout", "1"))
    yield started
    started.stop()


def client_of(started: Started, key: str | None) -> Any:
    need("httpx")
    import httpx

    return httpx.Client(base_url=started.url, headers={} if key is None else {"x-api-key": key}, timeout=30)


def cached(client: Any, **more: Any) -> int:
    return client.post(CHAT, json={**BODY, **more}).json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_one_tenant_can_not_time_what_another_asked(keyed: Started) -> None:
    with client_of(keyed, "one") as one, client_of(keyed, "two") as two:
        assert cached(one) == 0 and cached(one) > 0, "within a key prompts are shared"
        assert cached(two) == 0, "between keys they are not"
        assert cached(one, cache_salt="mine") == 0


def test_every_route_but_the_probes_and_the_page_wants_a_key(keyed: Started) -> None:
    with client_of(keyed, None) as nobody, client_of(keyed, "one") as user, client_of(keyed, "boss") as boss:
        routes = boss.get("/openapi.json").json()["paths"]
        assert len(routes) > 15
        for path, methods in routes.items():
            concrete = re.sub(r"\{[^}]*\}", "x", path)
            for method in methods:
                status = nobody.request(method, concrete, json={}).status_code
                if path in OPEN or path.startswith("/page/"):
                    continue
                assert status == 401, (method, path, status)
                if path.startswith("/admin"):
                    assert user.request(method, concrete, json={}).status_code == 401, path
        assert nobody.get("/openapi.json").status_code == 401 and nobody.get("/metrics").status_code == 401


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..\\x", "a" * 400, "x\0y"])
def test_names_lead_to_no_file(keyed: Started, name: str) -> None:
    with client_of(keyed, "one") as client:
        reply = client.post(CHAT, json={**BODY, "model": name})
        assert reply.status_code == 404 and reply.json()["error"]["code"] == "model_not_found"
        reply = client.post("/v1/responses", json={"input": "x", "previous_response_id": name})
        assert reply.status_code in (400, 404), reply.text
        assert client.get("/page/%2e%2e/%2e%2e/routes.py").status_code in (404, 400)


def test_no_media_is_fetched_and_no_template_is_taken(keyed: Started) -> None:
    with client_of(keyed, "one") as client:
        for url in ("http://169.254.169.254/latest", "file:///etc/passwd", "data:image/png;base64," + "A" * 1000):
            part = {"type": "image_url", "image_url": {"url": url}}
            reply = client.post(CHAT, json={**BODY, "messages": [{"role": "user", "content": [part]}]})
            assert reply.status_code == 400, reply.text
        reply = client.post(CHAT, json={**BODY, "chat_template": "{{ 7 * 7 }}"})
        assert reply.status_code == 400 and reply.json()["error"]["code"] == "unknown_field"
        for name in ("messages", "chat_template", "_quire_tick", "bos_token"):
            reply = client.post(CHAT, json={**BODY, "chat_template_kwargs": {name: "x"}})
            assert reply.status_code == 400, name
        body = {"messages": [{"role": "user", "content": "{{ 7 * 191 }}"}]}
        said = client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
        assert said == "{{ 7 * 191 }}", "a message is text, never a template"


def test_equal_ids_of_clients_do_not_meet(keyed: Started) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with client_of(keyed, "one") as client, ThreadPoolExecutor(8) as pool:
        said = [f"word number {index}" for index in range(24)]

        def ask(text: str) -> str:
            body = {"messages": [{"role": "user", "content": text}]}
            reply = client.post(CHAT, json=body, headers={"x-request-id": "the-same"})
            return reply.json()["choices"][0]["message"]["content"]

        assert list(pool.map(ask, said)) == said


def test_a_reader_who_does_not_read_is_cut_off(keyed: Started) -> None:
    """The engine's work for it ends, and so does the memory it holds."""
    import json
    import socket

    host, port = keyed.url.removeprefix("http://").split(":")
    body = {"prompt": "one two three", "max_tokens": 4000, "n": 5, "logprobs": 5, "stream": True}
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Api-Key: one\r\nContent-Type: application/json\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        with client_of(keyed, "boss") as boss:
            route = '{route="/v1/completions"} 1.0'  # cut by us, or by the system before we notice
            ends = (f"quire_cut_readers_total{route}", f"quire_disconnects_total{route}")
            until(lambda: any(end in boss.get("/metrics").text for end in ends), 60)
            until(lambda: not boss.get("/admin/engine").json()["live"])
            assert boss.post("/admin/check").json()["ok"]


def test_a_more_important_request_takes_a_waiting_ones_place(model_here: None) -> None:
    from concurrent.futures import ThreadPoolExecutor

    started = start(stub_command("--max-rows", "1", "--max-waiting", "1"), {"STUB_STEP_SECONDS": "0.02"})
    try:
        with client_of(started, None) as client, ThreadPoolExecutor(2) as pool:
            body = {"prompt": "one two three", "max_tokens": 60}
            live = lambda: client.get("/v1/stats").json()["http"]["live"]  # noqa: E731
            # It runs for as long as we read it: who comes next waits, however slow this test is.
            with client.stream("POST", "/v1/completions", json={**body, "max_tokens": 4000, "stream": True}) as running:
                events = events_of(running.iter_lines())
                next(events)
                waiting = pool.submit(client.post, "/v1/completions", json={**body, "priority": 5})
                until(lambda: live() == 2)
                refused = client.post("/v1/completions", json={**body, "priority": 5})
                assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
                urgent = pool.submit(client.post, "/v1/completions", json={**body, "priority": -1})
                assert waiting.result().status_code == 429
                assert next(events)["choices"], "who runs is not touched"
            assert urgent.result().status_code == 200
    finally:
        started.stop()
