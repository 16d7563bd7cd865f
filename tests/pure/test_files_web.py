"""The HTTP client against a real local server, and the stand-in hub that the other fetching tests use too."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from quire.files import web
from quire.files.web import HubRefusal, Unreachable, WebClient
from quire.types import QuireError

COMMIT = "c0ffee" + "0" * 34


@dataclass
class FakeHub:
    """Serves the hub's listing and file addresses for its `files`, and misbehaves where told to."""

    repo: str = "owner/name"
    commit: str = COMMIT
    files: dict[str, bytes] = field(default_factory=dict)
    listed: dict[str, dict[str, Any]] = field(default_factory=dict)  # changes to a file's entry in the listing
    answers: dict[str, tuple[int, dict[str, str], bytes]] = field(default_factory=dict)  # path -> a fixed answer
    breaks: dict[str, list[int]] = field(default_factory=dict)  # file -> bytes after which each request breaks off
    lengths: dict[str, int] = field(default_factory=dict)  # file -> a Content-Length that is a lie
    served: dict[str, bytes] = field(default_factory=dict)  # file -> other bytes than listed
    gates: dict[str, threading.Event] = field(default_factory=dict)  # file -> held back until this is set
    ranges: bool = True
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    url: str = ""

    def listing(self) -> dict[str, Any]:
        siblings = []
        for name, content in self.files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(content)}
            if name.endswith((".safetensors", ".gguf")):
                entry["lfs"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            siblings.append({**entry, **self.listed.get(name, {})})
        return {"id": self.repo, "sha": self.commit, "siblings": siblings}

    def asked_for(self, name: str) -> list[dict[str, str]]:
        """The headers of every request for one file."""
        return [headers for path, headers in self.requests if path.endswith(f"/resolve/{self.commit}/{name}")]

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        self.requests.append((path, {key.lower(): value for key, value in request.headers.items()}))
        if path in self.answers:
            self.reply(request, *self.answers[path])
        elif path == f"/api/models/{self.repo}/revision/main" or path.endswith(f"/revision/{self.commit}"):
            self.reply(request, 200, {}, json.dumps(self.listing()).encode())
        elif (match := re.fullmatch(rf"/{self.repo}/resolve/{self.commit}/(.+)", path)) and match[1] in self.files:
            self.send_file(request, match[1])
        else:
            self.reply(request, 404, {}, b"")

    def send_file(self, request: BaseHTTPRequestHandler, name: str) -> None:
        if name in self.gates:
            self.gates[name].wait(30)
        content = self.served.get(name, self.files[name])
        wanted = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", "")) if self.ranges else None
        start = int(wanted[1]) if wanted else 0
        if start and start >= len(content):
            return self.reply(request, 416, {}, b"")
        headers = {"Content-Length": str(self.lengths.get(name, len(content) - start))}
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        if self.breaks.get(name):
            body = body[: self.breaks[name].pop(0)]
        self.reply(request, 206 if wanted else 200, headers, body)

    @staticmethod
    def reply(request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes) -> None:
        request.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            if value:
                request.send_header(key, value)
        request.end_headers()
        request.wfile.write(body)


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.handle(self)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Recorder:
    """Progress that remembers."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.starts: list[tuple[str, int, int]] = []

    def start(self, what: str, total: int, done: int = 0) -> None:
        self.starts.append((what, total, done))

    def update(self, done: int) -> None: ...

    def finish(self) -> None: ...

    def note(self, line: str) -> None:
        self.notes.append(line)


def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the machine's own hub or proxy settings."""
    hub = ("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
    for name in (*hub, "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "*")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    clean_environment(monkeypatch)


def test_the_token_stays_with_the_endpoint() -> None:
    with serve(FakeHub()) as elsewhere, serve(FakeHub()) as hub:
        elsewhere.answers["/blob"] = (200, {}, b'"there"')
        hub.answers["/near"] = (307, {"Location": "/here"}, b"")
        hub.answers["/here"] = (200, {}, b'"here"')
        hub.answers["/far"] = (302, {"Location": f"{elsewhere.url}/blob"}, b"")
        client = WebClient(hub.url, " secret-token\n")
        assert client.get_json("/near") == "here"
        assert [headers.get("authorization") for _, headers in hub.requests] == ["Bearer secret-token"] * 2
        assert client.get_json("/far") == "there"
        assert elsewhere.requests and "authorization" not in elsewhere.requests[0][1]


@pytest.mark.parametrize("target", ["http://other.example/x", "file:///etc/hostname", "ftp://other.example/x"])
def test_a_redirect_never_leaves_tls(target: str) -> None:
    request = urllib.request.Request("https://hub.example/x")
    with pytest.raises(urllib.error.URLError):
        web._RedirectHandler().redirect_request(request, None, 302, "Found", {}, target)


def test_endless_redirects_end() -> None:
    with serve(FakeHub()) as hub:
        hub.answers["/round"] = (302, {"Location": "/round"}, b"")
        with pytest.raises((HubRefusal, Unreachable)):
            WebClient(hub.url, None).get_json("/round")
        assert len(hub.requests) < 20


def test_a_bad_token_is_not_repeated() -> None:
    with pytest.raises(QuireError) as caught:
        WebClient("http://127.0.0.1:1", "secret\r\nHost: x")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("endpoint", ["file:///etc", "ftp://x", "huggingface.co", "http://"])
def test_only_web_addresses(endpoint: str) -> None:
    with pytest.raises(QuireError, match="HF_ENDPOINT"):
        WebClient(endpoint, None)


def test_nobody_listens() -> None:
    with socket.socket() as bound:  # bound but not listening: the port is ours and refuses
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(Unreachable, match="connection refused"):
            WebClient(f"http://127.0.0.1:{bound.getsockname()[1]}", None).open("/")


def test_name_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(Unreachable, match="its name does not resolve"):
        WebClient("http://hub.example", None).open("/")


def test_a_silent_name_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait(30) and [])
    monkeypatch.setattr(web, "CONNECT_SECONDS", 0.02)
    with pytest.raises(Unreachable, match="no answer in time"):
        WebClient("http://hub.example", None).open("/")
    released.set()


def test_a_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "READ_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Unreachable, match="no answer in time"):
        WebClient(f"http://127.0.0.1:{silent.getsockname()[1]}", None).open("/")


def test_answers_that_are_not_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "MAX_JSON_BYTES", 100)
    with serve(FakeHub()) as hub:
        hub.answers["/html"] = (200, {}, b"<html>log in to the hotel's network</html>")
        hub.answers["/long"] = (200, {}, b"[" + b"1," * 200 + b"1]")
        hub.answers["/no"] = (403, {"X-Error-Code": "GatedRepo"}, b"")
        client = WebClient(hub.url, None)
        with pytest.raises(Unreachable, match="not JSON"):
            client.get_json("/html")
        with pytest.raises(Unreachable, match="too long"):
            client.get_json("/long")
        with pytest.raises(HubRefusal) as caught:
            client.get_json("/no")
        assert (caught.value.status, caught.value.reason_code) == (403, "GatedRepo")
