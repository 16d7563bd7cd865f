"""A small HTTP client for the hub on the standard library: quick to give up on a dead network, careful with the token.

`hub` lists repositories with it, `fetch` downloads files. It raises `Unreachable` (nobody answered, or the line broke)
or `Refused` (the server answered with an error); the callers turn these into words for people.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from quire.types import QuireError

ADDRESS_SECONDS = 1.5  # one address of a host gets this long to accept a connection
CONNECT_SECONDS = 3.0  # all of them together; and the name server
READ_SECONDS = 30.0  # silence on an open connection
MAX_JSON_BYTES = 64 << 20


class Unreachable(Exception):
    """No connection, or one that broke; `str()` says why in a few words."""


class Refused(Exception):
    """The server said no. `reason_code` is the hub's own word for it, where it gives one."""

    def __init__(self, status: int, reason_code: str):
        super().__init__(f"HTTP {status}")
        self.status = status
        self.reason_code = reason_code


class WebClient:
    """Requests below one endpoint. The token goes to that endpoint alone, never along a redirect to another host."""

    def __init__(self, endpoint: str, token: str | None):
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise QuireError("invalid_parameter", f"HF_ENDPOINT={endpoint!r} is not an http(s) address.")
        self.endpoint = endpoint.rstrip("/")
        self.host = parts.hostname
        self._token = _check_token(token)
        self._opener = urllib.request.OpenerDirector()  # not build_opener: that one would also read file: and ftp:
        for handler in (
            urllib.request.ProxyHandler(), urllib.request.UnknownHandler(), _PlainHandler(), _SecureHandler(),
            urllib.request.HTTPDefaultErrorHandler(), urllib.request.HTTPErrorProcessor(), _RedirectHandler(),
        ):  # fmt: skip
            self._opener.add_handler(handler)

    def open(self, path: str, start: int = 0) -> http.client.HTTPResponse:
        """GET `path` (already quoted), from byte `start` on. The caller closes what comes back."""
        request = urllib.request.Request(self.endpoint + path, headers={"User-Agent": "quire"})
        if start:
            request.add_header("Range", f"bytes={start}-")
        if self._token:
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        try:
            return self._opener.open(request)
        except urllib.error.HTTPError as error:
            error.close()
            raise Refused(error.code, error.headers.get("X-Error-Code") or "") from None
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(explain(error)) from None

    def get_json(self, path: str) -> Any:
        try:
            with self.open(path) as response:
                body = response.read(MAX_JSON_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(explain(error)) from None
        if len(body) > MAX_JSON_BYTES:
            raise Unreachable("its answer is far too long")
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise Unreachable("its answer is not JSON") from None


def explain(error: BaseException) -> str:
    """A few words for the commonest failures of a network."""
    reason = getattr(error, "reason", error)
    if isinstance(reason, socket.gaierror):
        return "its name does not resolve"
    if isinstance(reason, TimeoutError):
        return "no answer in time"
    if isinstance(reason, ConnectionRefusedError):
        return "connection refused"
    if isinstance(reason, ssl.SSLCertVerificationError):
        return "its certificate is not trusted"
    if isinstance(reason, http.client.HTTPException):
        return "the connection broke"
    return getattr(reason, "strerror", None) or str(reason) or type(reason).__name__


def _check_token(token: str | None) -> str | None:
    token = (token or "").strip()
    if not all(33 <= ord(letter) <= 126 for letter in token):  # http.client would quote it in its own error
        raise QuireError("invalid_parameter", "The hub token holds characters no token has.", param="hub_token")
    return token or None


# ---------------------------------------------------------------------------------------------------------------------
# Connections with two kinds of patience


def _connect(address: tuple[str, int], *_: Any) -> socket.socket:
    """Like `socket.create_connection`, with a deadline over all addresses of the host and none of its waiting."""
    deadline = time.monotonic() + CONNECT_SECONDS
    failure: OSError = TimeoutError("timed out")
    for family, kind, protocol, _name, target in _look_up(address):
        left = min(ADDRESS_SECONDS, deadline - time.monotonic())
        if left <= 0:
            break
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(left)
            connection.connect(target)
        except OSError as error:
            connection.close()
            failure = error
            continue
        connection.settimeout(READ_SECONDS)
        return connection
    raise failure


def _look_up(address: tuple[str, int]) -> list[Any]:
    """Addresses of a host. In a thread, since a name server that is gone would hold us for half a minute."""
    answer: list[Any] = []

    def ask() -> None:
        try:
            answer.append(socket.getaddrinfo(*address, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            answer.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(CONNECT_SECONDS)
    if not answer:
        raise TimeoutError("the name server does not answer")
    if isinstance(answer[0], UnicodeError):
        raise OSError("it is not a host name")
    if isinstance(answer[0], OSError):
        raise answer[0]
    return answer[0]


class _PlainConnection(http.client.HTTPConnection):
    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._create_connection = _connect


class _SecureConnection(http.client.HTTPSConnection):
    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._create_connection = _connect


class _PlainHandler(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_PlainConnection, request)


class _SecureHandler(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_SecureConnection, request, context=ssl.create_default_context())


class _RedirectHandler(urllib.request.HTTPRedirectHandler):
    """The hub keeps large files elsewhere. The token follows within the same host only, and never out of TLS."""

    max_redirections = 5

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if new.scheme != "https" and (old.scheme == "https" or new.scheme != "http"):
            raise urllib.error.URLError("it redirects to an unsafe address")
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        token = req.unredirected_hdrs.get("Authorization")
        if following is not None and token and (old.scheme, old.netloc) == (new.scheme, new.netloc):
            following.add_unredirected_header("Authorization", token)
        return following
