"""A server with a cache folder that is killed and started again: sessions, their owners, and what a folder refuses."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ADMIN_KEY, Started, need, start

TALK = [{"role": "user", "content": "why is the sky blue because light is scattered " * 8}]
ASK = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, model_here: None) -> Path:
    need("torch", "transformers", "httpx")
    from tests.cpu.tiny_llm import make_tiny_llm

    return make_tiny_llm(tmp_path_factory.mktemp("tiers") / "model", max_position_embeddings=2048)


def serve(model: Path, cache: Path, *flags: str) -> Started:
    command = [
        sys.executable,
        "-m",
        "quire",
        "serve",
        str(model),
        "--port",
        "0",
        "--api-key",
        "one,two",
        "--admin-key",
        ADMIN_KEY,
        "--threads",
        "1",
        "--dtype",
        "float32",
        "--num-pages",
        "100",
        "--host-memory",
        "16MiB",
        "--cache-dir",
        str(cache),
        *flags,
    ]
    return start(command)


def client_of(started: Started, key: str = "one") -> Any:
    import httpx

    return httpx.Client(base_url=started.url, headers={"x-api-key": key}, timeout=120)


def chat(client: Any, messages: list[dict[str, str]]) -> dict[str, Any]:
    reply = client.post("/v1/chat/completions", json={"messages": messages, **ASK})
    assert reply.status_code == 200, reply.text
    return reply.json()


def end_engine_and_server(started: Started) -> None:
    """Kill the server without a chance to write anything."""
    started.process.kill()
    started.process.wait()


@pytest.fixture(scope="module")
def talked(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[dict[str, str]]]]:
    """A cache folder in which a killed server has saved the session "sky", and its conversation."""
    cache = tmp_path_factory.mktemp("tiers-cache") / "cache"
    started = serve(model, cache)
    with client_of(started) as client, client_of(started, "two") as other:
        talk = [*TALK, {"role": "assistant", "content": chat(client, TALK)["choices"][0]["message"]["content"]}]
        saved = client.post("/v1/sessions/sky/save", json={"messages": talk})
        assert saved.status_code == 200, saved.text
        body = saved.json()
        assert body["object"] == "session" and body["saved_tokens"] > 60 and body["num_bytes"] > 0
        assert client.get("/v1/sessions/sky").json()["messages"] == talk
        assert other.get("/v1/sessions/sky").status_code == 404, "another key's"
        assert other.post("/v1/sessions/sky/save", json={"messages": talk}).status_code == 409, "nothing of its own"
        for name in ("x" * 129, "-x", "a%2Fb", "%2e%2e", "a b"):
            assert client.get(f"/v1/sessions/{name}").status_code in (400, 404), name
            assert client.post(f"/v1/sessions/{name}/load").status_code in (400, 404), name
        assert client.post("/v1/sessions/none/load").json()["error"]["code"] == "session_not_found"
        assert client.post("/v1/sessions/sky/save", json={"prompt": "never seen"}).status_code == 409
        assert client.post("/v1/sessions/sky/save", json={}).status_code == 400
    end_engine_and_server(started)
    yield cache, talk


def test_a_killed_servers_session_is_loaded_by_the_next(model: Path, talked: tuple[Path, list[dict[str, str]]]) -> None:
    cache, talk = talked
    started = serve(model, cache)
    try:
        with client_of(started) as client, client_of(started, ADMIN_KEY) as admin:
            loaded = client.post("/v1/sessions/sky/load").json()
            assert loaded["ready_tokens"] == loaded["saved_tokens"] > 60
            before = admin.get("/v1/stats").json()["engine"]["computed_tokens"]
            usage = chat(client, [*talk, {"role": "user", "content": "why"}])["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached >= loaded["saved_tokens"] and usage["prompt_tokens"] - cached < 64
            assert admin.post("/admin/check").json()["ok"]
            engine = admin.get("/v1/stats").json()["engine"]
            tiers = {tier["name"]: tier for tier in engine["tiers"]}
            assert engine["computed_tokens"] - before <= usage["prompt_tokens"] - cached + 2 * ASK["max_tokens"]
            assert tiers["disk"]["hits"] > 0 and tiers["disk"]["corrupt"] == 0
            assert 'quire_engine_tier_hits_total{engine="0",tier="disk"}' in admin.get("/metrics").text
            assert client.delete("/v1/sessions/sky").json()["deleted"]
            assert client.get("/v1/sessions/sky").status_code == 404
    finally:
        started.stop()


def test_a_disk_that_fails_costs_no_answer_and_is_told_once(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    started = serve(model, cache)
    try:
        for shard in range(256):  # a file where each folder would be: every write fails, also for root
            (cache / f"{shard:02x}").write_text("")
        with client_of(started) as client, client_of(started, ADMIN_KEY) as admin:
            for _ in range(3):
                chat(client, TALK)
            metrics = admin.get("/metrics").text
            failures = [line for line in metrics.splitlines() if line.startswith("quire_engine_tier_failures_total{")]
            assert any('tier="disk"' in line and not line.endswith(" 0.0") for line in failures), failures
            assert admin.get("/admin/errors").json()["counts"].get("message/cache_tier") == 1
    finally:
        started.stop()
    assert sum("cache_tier" in line for line in started.lines) == 1, started.lines
    assert os.listdir(cache)
