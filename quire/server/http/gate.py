"""The gate that every HTTP request passes first: request id, key, rate limit, size and type of the body, CORS.

It is a plain ASGI layer around the app. It counts and logs every reply, and turns every exception that escapes a route
into an error in the caller's dialect, so that no stack trace and no empty reply reaches a client.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.http.body_pace import BodyPace
from quire.server.http.errors import ApiError, bad_request, dialect_of, error_response
from quire.server.http.host_names import HostNames
from quire.server.http.keys import key_of, owner_of_key, tenant_of
from quire.server.http.request_ids import request_id
from quire.server.state import Server
from quire.server.streams.kept_streams import EVENT_ID
from quire.server.tracing.spans import FinishedRequest, read_parent

PROBES = frozenset({"/health", "/ping", "/healthz", "/readyz"})
ADMIN_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})  # besides those below /admin
OPEN_PATHS = frozenset({"/", "/favicon.ico"})
OPEN_FOLDER = "/page/"
UPLOAD_PATH = "/v1/files"
# Of a repeated header one reader may take the first and another the last value.
GIVEN_ONCE = frozenset({"authorization", "x-api-key", "host", "origin", "content-type", "content-length"})
BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})
CORS_HEADERS = "authorization, content-type, x-api-key, x-request-id, anthropic-version, anthropic-beta"
CORS_METHODS = "GET, POST, DELETE, OPTIONS"
CORS_SHOWN = ", ".join(
    (
        "x-request-id",
        "request-id",
        "retry-after",
        "x-quire-warning",
        "x-quire-ignored",
        "x-quire-stream",
        *(f"x-ratelimit-{what}-{unit}" for unit in ("requests", "tokens") for what in ("limit", "remaining", "reset")),
    )
)
_HEADER_NAMES = re.compile(r"[A-Za-z0-9, _-]{1,4096}")


class Gate:
    """The ASGI application in front of the routes."""

    def __init__(self, app: ASGIApp, server: Server):
        self._app = app
        self._server = server
        origins = [origin.strip() for origin in (server.config.server.cors_origins or "").split(",")]
        self._origins = {origin for origin in origins if origin}
        settings = server.config.server
        self.names = HostNames(settings.host, settings.allowed_hosts, not server.keys, self._origins)
        self._root_path = (settings.root_path or "").rstrip("/")
        self.pace = BodyPace(settings.body_timeout, settings.min_body_rate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        root = self._root_path
        if root and scope["path"].startswith(f"{root}/"):  # a proxy that passes its own prefix on
            path = scope["path"].removeprefix(root)
            scope = {**scope, "path": path, "raw_path": path.encode("utf-8", "replace")}
        await _GatedRequest(self, self._app, self._server, scope, receive, send).run()

    def cors(self, headers: Mapping[str, str]) -> dict[str, str]:
        origin = headers.get("origin")
        if origin is None or not self._origins:
            return {}
        shown = {"access-control-expose-headers": CORS_SHOWN}
        if "*" in self._origins:
            return {"access-control-allow-origin": "*", **shown}
        if origin not in self._origins:
            return {}
        return {"access-control-allow-origin": origin, "vary": "origin", **shown}


class _GatedRequest:
    """The passage of one request through the gate."""

    def __init__(self, gate: Gate, app: ASGIApp, server: Server, scope: Scope, receive: Receive, send: Send):
        self._gate, self._app, self._server, self._log = gate, app, server, server.log
        self._scope, self._receive, self._send = scope, receive, send
        self._path: str = scope["path"]
        self._headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        self._id = request_id(self._headers.get("x-request-id", ""))
        self._status = 0
        self._num_bytes = 0
        self._body_complete = False
        self._body_started: float | None = None
        self._limits: Any = None
        self._state: dict[str, Any] = {}
        self._extra = {"x-request-id": self._id, **gate.cors(self._headers)}
        if dialect_of(self._path) == "anthropic":
            self._extra["request-id"] = self._id

    async def run(self) -> None:
        server, started = self._server, time.monotonic()
        server.metrics.http_opened()
        server.reply_opened()
        scope = {**self._scope, "state": {**self._scope.get("state", {}), "request_id": self._id}}
        self._state = scope["state"]
        try:
            await self._pass(scope)
        finally:
            server.reply_closed()
            seconds = time.monotonic() - started
            route = route_label(scope)
            server.metrics.http_closed(route, self._scope["method"], self._status, seconds)
            level = "debug" if self._path in PROBES or self._path == "/metrics" else "info"
            totals = scope["state"].get("totals")  # set by routes that generate
            tokens = {} if totals is None else asdict(totals)
            if server.spans is not None and level == "info":
                server.spans.add(self._finished(route, started, tokens))
            self._log.write(
                level,
                "reply",
                id=self._id,
                method=self._scope["method"],
                path=self._path[:200],
                status=self._status,
                outcome=scope["state"].get("outcome"),
                seconds=seconds,
                caller=scope["state"].get("caller"),
                **tokens,
            )

    def _finished(self, route: str, started: float, totals: Mapping[str, Any]) -> FinishedRequest:
        return FinishedRequest(
            route=route,
            method=self._scope["method"],
            path=self._path[:200],
            status=self._status,
            request_id=self._id,
            model=self._server.name,
            parent=read_parent(self._headers.get("traceparent")),
            start=started,
            end=time.monotonic(),
            submitted=self._state.get("submitted"),
            totals=totals,
            outcome=self._state.get("outcome"),
        )

    async def _pass(self, scope: Scope) -> None:
        try:
            self._check_head()
            if await self._answer_preflight():
                return
            self._check_key(scope)
            self._check_body()
            self._take_up_stream(scope)
            await self._app(scope, self._count_body, self._send_on)
        except ApiError as error:  # raised by the gate itself; the app answers and counts errors of routes
            self._server.metrics.failed(route_label(scope), error.code)
            await self._refuse(error)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            self._log.write("error", "bug", id=self._id, path=self._path[:200], error=what, place=_place_of(error))
            self._server.metrics.failed(route_label(scope), "internal_error")
            await self._refuse(ApiError(500, "internal_error", "The server made a mistake. It has been logged."))

    async def _refuse(self, error: ApiError) -> None:
        if self._status:
            return  # the reply has started and reports the error itself
        await error_response(dialect_of(self._path), error, self._id)(self._scope, self._receive, self._send_on)

    async def _answer_preflight(self) -> bool:
        wants = self._headers.get("access-control-request-method")
        if self._scope["method"] != "OPTIONS" or wants is None:
            return False
        if "access-control-allow-origin" not in self._extra:
            raise ApiError(403, "cors_forbidden", "This origin may not call from a browser; see --cors-origins.")
        # SDKs send various headers about themselves; all well-formed names are allowed.
        asked = self._headers.get("access-control-request-headers", "")
        allowed = asked if _HEADER_NAMES.fullmatch(asked) else CORS_HEADERS
        self._extra |= {
            "access-control-allow-methods": CORS_METHODS,
            "access-control-allow-headers": allowed,
            "access-control-max-age": "600",
        }
        await self._send_on({"type": "http.response.start", "status": 204, "headers": []})
        await self._send_on({"type": "http.response.body", "body": b""})
        return True

    def _check_head(self) -> None:
        names = [name.decode("latin-1").lower() for name, _ in self._scope["headers"]]
        for name in GIVEN_ONCE:
            if names.count(name) > 1:
                raise bad_request("invalid_header", f"The header {name} was sent {names.count(name)} times. Send one.")
        local = (self._scope.get("server") or (None,))[0]
        self._gate.names.check(self._headers.get("host"), self._headers.get("origin"), local)

    def _check_key(self, scope: Scope) -> None:
        """Establish the caller. Routes read `owner` and `tenant` of the request's state, never the headers."""
        path, server = self._path, self._server
        key = key_of(self._headers)
        scope["state"]["owner"] = owner_of_key(key)
        if path in PROBES or path in OPEN_PATHS or path.startswith(OPEN_FOLDER):
            return
        if path == "/admin" or path.startswith("/admin/") or path in ADMIN_PATHS:
            if not server.admin_keys:
                raise ApiError(403, "admin_closed", "The admin routes are closed. Start the server with --admin-key.")
            self._demand(server.admin_keys.opens(key), key, "admin key")
            return
        if server.keys:
            self._demand(server.keys.opens(key) | server.admin_keys.opens(key), key, "API key")
            scope["state"]["caller"] = tenant_of(key or "")
            if not server.config.server.share_prefixes:
                scope["state"]["tenant"] = scope["state"]["caller"]
        if server.draining and path.startswith(("/v1/", "/api/", "/infill")):
            headers = {"retry-after": "5", "connection": "close"}
            raise ApiError(503, "shutting_down", "The server is shutting down.", headers=headers)
        if server.rates.active and self._scope["method"] == "POST":
            self._limits = server.rates.budget(key if server.keys and key else _address(self._scope))
            self._limits.take_request()
            scope["state"]["budget"] = self._limits

    def _take_up_stream(self, scope: Scope) -> None:
        """Answer a repeated request whose client has read a part of the reply with the rest of that reply."""
        known = EVENT_ID.fullmatch(self._headers.get("last-event-id", ""))
        if known is not None and self._path.startswith("/v1/") and self._scope["method"] == "POST":
            path = f"/v1/streams/{known.group(1)}"
            scope.update(method="GET", path=path, raw_path=path.encode(), query_string=b"")

    def _demand(self, opened: bool, key: str | None, name: str) -> None:
        if opened:
            return
        headers = {"www-authenticate": 'Bearer realm="quire"'}
        if key is None:
            raise ApiError(401, "missing_api_key", f"No {name} was sent. Send it as a bearer token.", headers=headers)
        raise ApiError(401, "invalid_api_key", f"The {name} is not valid.", headers=headers)

    def _check_body(self) -> None:
        if self._scope["method"] not in BODY_METHODS:
            return
        length = self._headers.get("content-length")
        if length is not None:
            if not re.fullmatch(r"[0-9]{1,18}", length):
                raise bad_request("invalid_header", "Content-Length is not a number.")
            self._check_size(int(length))
        has_body = length not in (None, "0") or "transfer-encoding" in self._headers
        kind = self._headers.get("content-type", "").partition(";")[0].strip().lower()
        if self._path == UPLOAD_PATH and kind == "multipart/form-data":
            return
        if has_body and kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            shown = f"{kind[:100]!r} is" if kind else "No content type is"
            raise ApiError(415, "unsupported_media_type", f"{shown} not taken. Send the body as application/json.")

    def _check_size(self, size: int) -> None:
        limit = self._server.config.server.max_body
        if size > limit:
            message = f"The body has {size} bytes or more, the limit is {limit}."
            raise ApiError(413, "body_too_large", message, headers={"connection": "close"})

    async def _count_body(self) -> Message:
        """Receive a message, with bounds on the body's size and pace. After the body, only a disconnect can arrive."""
        if self._body_complete:
            return await self._receive()
        pace, now = self._gate.pace, asyncio.get_running_loop().time()
        if self._body_started is None:
            self._body_started = now
        try:
            async with asyncio.timeout_at(pace.deadline(self._body_started, now, self._num_bytes)):
                message = await self._receive()
        except TimeoutError:
            seconds = asyncio.get_running_loop().time() - self._body_started
            message_text = (
                f"The body had {self._num_bytes} bytes after {seconds:.0f} s and is not complete. Send it within "
                f"{pace.seconds:g} s, and at {pace.rate} bytes a second or more."
            )
            raise ApiError(408, "body_too_slow", message_text, headers={"connection": "close"}) from None
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            self._body_complete = not message.get("more_body", False)
            self._check_size(self._num_bytes)
        return message

    async def _send_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            extra = {**self._extra, **(self._limits.headers() if self._limits is not None else {})}
            if self._state.get("ignored"):  # fields left out of the body, with --lenient
                extra["x-quire-ignored"] = ", ".join(map(_as_header, self._state["ignored"]))
            present = {name.lower() for name, _ in message.get("headers", [])}
            added = [
                (name.encode(), value.encode("latin-1"))
                for name, value in extra.items()
                if name.encode() not in present
            ]
            message = {**message, "headers": [*message.get("headers", []), *added]}
        await self._send(message)


def route_label(scope: Mapping[str, Any]) -> str:
    """The route's pattern, never the path: clients must not be able to create metric labels."""
    return getattr(scope.get("route"), "path", None) or "other"


def _as_header(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode("ascii").replace("\r", "").replace("\n", "")


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return f"address {client[0]}" if client else "address"


def _place_of(error: BaseException) -> str:
    trace, place = error.__traceback__, ""
    while trace is not None:
        place = f"{trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
