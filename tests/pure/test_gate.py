"""What the gate refuses before a route: names, origins, headers given twice, bodies that come too slowly."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("zmq")
pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")
pytest.importorskip("tokenizers")

from quire.server import app
from quire.server.http.body_pace import GRACE_SECONDS, IDLE_SECONDS, BodyPace
from quire.server.http.host_names import HostNames
from tests.fuzz.fake_server import FakeServer

CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}).encode()


class Serving:
    def __init__(self, folder: Path, runner: asyncio.Runner, **knobs: Any):
        async def make() -> FakeServer:
            return FakeServer(folder, **knobs)

        self._runner = runner
        self.fake = runner.run(make())

    def ask(self, path: str, *headers: tuple[str, str], method: str = "GET", body: bytes = b"",
            receive: Any = None) -> tuple[int, Any, dict[str, str]]:  # fmt: skip
        """Status, body and headers of the reply to a request with exactly these headers."""
        given = list(headers)
        if body:
            given += [("content-type", "application/json"), ("content-length", str(len(body)))]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
            "raw_path": path.encode(), "query_string": b"", "scheme": "http", "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in given],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        }  # fmt: skip
        status, shown, parts, messages = 0, {}, [], [{"type": "http.request", "body": body, "more_body": False}]

        async def from_list() -> Any:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            nonlocal status, shown
            if message["type"] == "http.response.start":
                status, shown = message["status"], {n.decode(): v.decode() for n, v in message["headers"]}
            else:
                parts.append(message.get("body", b""))

        self._runner.run(self.fake.app(scope, receive or from_list, send))
        text = b"".join(parts)
        return status, json.loads(text) if text[:1] in (b"{", b"[") else text, shown


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def code_of(reply: tuple[int, Any, Any]) -> tuple[int, str]:
    return reply[0], reply[1]["error"]["code"]


# -- names

OWN = [
    "localhost",
    "LOCALHOST:8000",
    "127.0.0.1:80",
    "127.8.0.1",
    "[::1]:8000",
    "a.localhost",
    "0.0.0.0:8000",
    "localhost.",
]
FOREIGN = [
    "evil.example",
    "evil.example:80",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "192.168.0.7",
    "a@localhost",
    "",
    "[::2]",
    "localhost:80:80",
]


def test_a_keyless_loopback_server_answers_to_names_of_this_machine_only(
    tmp_path: Path, runner: asyncio.Runner
) -> None:
    serving = Serving(tmp_path, runner)
    for host in OWN:
        assert serving.ask("/v1/models", ("host", host))[0] == 200, host
        assert serving.ask(CHAT, ("host", host), method="POST", body=BODY)[0] == 200, host
    for host in FOREIGN:
        assert code_of(serving.ask("/v1/models", ("host", host))) == (403, "host_forbidden"), host
        assert serving.ask("/", ("host", host))[0] == 403
    assert serving.ask("/v1/models")[0] == 200, "no browser leaves the header out"


def test_websites_may_not_call_a_keyless_loopback_server(tmp_path: Path, runner: asyncio.Runner) -> None:
    serving = Serving(tmp_path, runner, cors_origins="https://page.example")
    own = ["http://localhost:8000", "http://127.0.0.1:3000", "http://[::1]", "https://page.example"]
    for origin in own:
        assert serving.ask(CHAT, ("host", "localhost"), ("origin", origin), method="POST", body=BODY)[0] == 200, origin
    for origin in ("https://evil.example", "null", "http://localhost.evil.example", "", "https://page.example.evil"):
        for method, body in (("GET", b""), ("POST", BODY)):
            said = serving.ask(CHAT, ("host", "localhost"), ("origin", origin), method=method, body=body)
            assert code_of(said) == (403, "cors_forbidden"), origin
    assert serving.ask(CHAT, ("host", "localhost"), method="POST", body=BODY)[0] == 200, "programs send none"


def test_which_servers_ask_for_names() -> None:
    assert HostNames("127.0.0.1", None, True, ()).active and HostNames("::1", None, True, ()).active
    assert HostNames("localhost", None, True, ()).active
    assert not HostNames("127.0.0.1", None, False, ()).active, "a website does not know the key"
    assert not HostNames("192.168.0.7", None, True, ()).active, "it may have any name in its network"
    assert HostNames("192.168.0.7", "box.lan", False, ()).active
    assert not HostNames("127.0.0.1", "*", True, ()).active


def test_names_can_be_configured(tmp_path: Path, runner: asyncio.Runner) -> None:
    serving = Serving(tmp_path, runner, allowed_hosts="Quire.lan, other", api_key="one")
    for host in ("quire.lan:8000", "other", "localhost"):
        assert serving.ask("/v1/models", ("host", host), ("x-api-key", "one"))[0] == 200
    assert serving.ask("/v1/models", ("host", "evil"), ("x-api-key", "one"))[0] == 403


# -- headers given twice


@pytest.mark.parametrize("name", ["authorization", "x-api-key", "host", "origin", "content-type"])
def test_headers_that_decide_are_given_once(tmp_path: Path, runner: asyncio.Runner, name: str) -> None:
    serving = Serving(tmp_path, runner)
    for second in ("localhost", "http://localhost"):
        assert code_of(serving.ask("/v1/models", (name, "localhost"), (name, second))) == (400, "invalid_header")


def test_a_revoked_key_beside_a_good_one_reads_nothing(tmp_path: Path, runner: asyncio.Runner) -> None:
    """The gate and the store of responses know the same caller, or none."""
    serving = Serving(tmp_path, runner, api_key="old,new")
    old, new, both = ("authorization", "Bearer old"), ("authorization", "Bearer new"), ("x-api-key", "new")
    body = json.dumps({"input": "secret", "max_output_tokens": 1}).encode()
    name = serving.ask("/v1/responses", old, method="POST", body=body)[1]["id"]
    path = f"/v1/responses/{name}"
    assert serving.ask(path, old)[0] == 200 and serving.ask(path, ("x-api-key", "old"))[0] == 200
    assert serving.ask(path, new)[0] == 404
    for headers in ((old, new), (new, old), (old, both), (both, old), (new, new)):
        assert code_of(serving.ask(path, *headers)) == (400, "invalid_header"), headers
    assert serving.ask(path, old, ("x-api-key", "old"))[0] == 200, "twice the same key is one key"


# -- bodies


def test_the_pace_of_a_body() -> None:
    pace = BodyPace(300.0, 1000)
    assert pace.deadline(0.0, 0.0, 0) == GRACE_SECONDS, "nothing has come"
    assert pace.deadline(0.0, 10.0, 5000) == GRACE_SECONDS + 5
    assert pace.deadline(0.0, 10.0, 1 << 30) == 10 + IDLE_SECONDS, "a fast one may rest"
    assert pace.deadline(0.0, 290.0, 1 << 30) == 300.0, "but not for ever"
    assert BodyPace(300.0, 0).deadline(0.0, 100.0, 1) == 100 + IDLE_SECONDS


@pytest.mark.parametrize(
    "knobs", [{"body_timeout": 0.1, "min_body_rate": 0}, {"min_body_rate": 1 << 30}], ids=["time", "rate"]
)
def test_a_body_that_drips_is_cut_off(
    tmp_path: Path, runner: asyncio.Runner, knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte comes whenever one is asked for, so no single wait is long; all of them together are."""
    from quire.server.http import body_pace

    monkeypatch.setattr(body_pace, "GRACE_SECONDS", 0.1)
    serving = Serving(tmp_path, runner, **knobs)
    count = 0

    async def drip() -> Any:
        nonlocal count
        count += 1
        assert count < 10_000
        await asyncio.sleep(0.001)
        return {"type": "http.request", "body": b" ", "more_body": True}

    json_type = ("content-type", "application/json")
    said = serving.ask(CHAT, json_type, ("transfer-encoding", "chunked"), method="POST", receive=drip)
    assert code_of(said) == (408, "body_too_slow") and said[2]["connection"] == "close"


# -- the document of all routes


def test_the_document_is_made_once_and_off_the_event_loop(
    tmp_path: Path, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_by: list[threading.Thread] = []
    make = app._make_document

    def recorded(*given: Any) -> bytes:
        made_by.append(threading.current_thread())
        return make(*given)

    monkeypatch.setattr(app, "_make_document", recorded)
    serving = Serving(tmp_path, runner)
    first, second = serving.ask("/openapi.json"), serving.ask("/openapi.json")
    assert first[1] == second[1] and "/v1/chat/completions" in first[1]["paths"]
    assert len(made_by) == 1 and made_by[0] is not threading.main_thread()
    assert not any("422" in one["responses"] for path in first[1]["paths"].values() for one in path.values())
    assert serving.ask("/openapi.json", method="POST")[1]["error"]["message"].endswith("only GET, HEAD.")


# -- HEAD


def test_head_wherever_there_is_a_get(tmp_path: Path, runner: asyncio.Runner) -> None:
    serving = Serving(tmp_path, runner)
    document = serving.ask("/openapi.json")[1]["paths"]
    assert not any("head" in operations for operations in document.values())
    paths = [path for path, operations in document.items() if "get" in operations and "{" not in path]
    assert len(paths) > 5
    for path in [*paths, "/", "/favicon.ico", "/health"]:
        got, headed = serving.ask(path), serving.ask(path, method="HEAD")
        assert headed[0] == got[0] and headed[2]["content-type"] == got[2]["content-type"], path
    assert serving.ask("/live", method="HEAD")[0] == 405, "its reply has no end"
