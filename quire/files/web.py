"""A small HTTP client for the hub on the standard library, with short timeouts and a token that stays on its host.

`hub` lists repositories with it, `fetch` downloads files. It raises `Unreachable` (no answer, or a broken connection)
or `HubRefusal` (an HTTP error status); callers turn these into user messages.
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

ADDRESS_SECONDS = 1.5  # timeout to connect to one address of a host
CONNECT_SECONDS = 3.0  # timeout for all addresses together, and for the name server
READ_SECONDS = 30.0  # silence on an open connection
MAX_JSON_BYTES = 64 << 20


class Unreachable(Exception):
    """No connection, or a broken one; `str()` is a short reason."""


class HubRefusal(Exception):
    """An HTTP error status. `reason_code` is the hub's error code, or empty."""

    def __init__(self, status: int, reason_code: str):
        super().__init__(f"HTTP {status}")
        self.status = status
        self.reason_code = reason_code


class WebClient:
    """Sends requests to one endpoint. The token goes only to that endpoint, never to another host by a redirect."""

    def __init__(self, endpoint: str, token: str | None):
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise QuireError("invalid_parameter", f"HF_ENDPOINT={endpoint!r} is not an http(s) address.")
        self.endpoint = endpoint.rstrip("/")
        self.host = parts.hostname
        self._token = _check_token(token)
        self._opener = urllib.request.OpenerDirector()  # build_opener would also accept file: and ftp:
        for handler in (
            urllib.request.ProxyHandler(),
            urllib.request.UnknownHandler(),
            _PlainHandler(),
            _SecureHandler(),
            urllib.request.HTTPDefaultErrorHandler(),
            urllib.request.HTTPErrorProcessor(),
            _RedirectHandler(),
        ):
            self._opener.add_handler(handler)

    def open(self, path: str, start: int = 0) -> http.client.HTTPResponse:
        """Sends GET for a quoted path, from byte `start` on. The caller closes the response."""
        request = urllib.request.Request(self.endpoint + path, headers={"User-Agent": "quire"})
        if start:
            request.add_header("Range", f"bytes={start}-")
        if self._token:
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        try:
            response: http.client.HTTPResponse = self._opener.open(request)
            return response
        except urllib.error.HTTPError as error:
            error.close()
            raise HubRefusal(error.code, error.headers.get("X-Error-Code") or "") from None
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(explain(error)) from None

    def get_json(self, path: str) -> Any:
        """Returns the JSON content of a path."""
        try:
            with self.open(path) as response:
                body = response.read(MAX_JSON_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(explain(error)) from None
        if len(body) > MAX_JSON_BYTES:
            raise Unreachable("its answer is too long")
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise Unreachable("its answer is not JSON") from None


def explain(error: BaseException) -> str:
    """Returns a short description of a network error."""
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
    if not all(33 <= ord(letter) <= 126 for letter in token):  # http.client would show the token in its error
        raise QuireError(
            "invalid_parameter", "The hub token has characters that are not allowed in a token.", param="hub_token"
        )
    return token or None


# ---------------------------------------------------------------------------------------------------------------------
# Connections with separate timeouts for connecting and reading


def _connect(address: tuple[str, int], *_: Any) -> socket.socket:
    """Connects like `socket.create_connection`, with a deadline for all addresses of the host together."""
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
    """Resolves a host in a thread, since an unreachable name server would block for half a minute."""
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
    addresses: list[Any] = answer[0]
    return addresses


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
    """Follows redirects to the hub's file storage. The token is sent only to the same scheme and host."""

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
