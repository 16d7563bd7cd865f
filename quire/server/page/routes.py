"""Routes of the page at `/`: its files, which need no key, and its feed, which needs the key like every route.

The files are read once at start and served with a content policy that forbids loading anything from other origins.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from quire.server.http.errors import ApiError
from quire.server.http.keys import key_of
from quire.server.page.history import History, RememberingLog
from quire.server.page.live import LiveFeed
from quire.server.state import Server

STATIC = Path(__file__).with_name("static")
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # revalidated each time, usually with 304
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of the page, with its entity tag."""

    body: bytes
    media_type: str
    etag: str

    def reply(self, request: Request) -> Response:
        headers = {**HEADERS, "etag": self.etag}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.media_type, headers=headers)


def load_assets(folder: Path = STATIC) -> dict[str, Asset]:
    assets = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in TYPES:
            body = path.read_bytes()
            assets[path.name] = Asset(body, TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:20]}"')
    return assets


def page_router(server: Server) -> APIRouter:
    """The page's router. Its routes are not in the OpenAPI document, because the feed is internal to the page."""
    router = APIRouter(include_in_schema=False)
    assets = load_assets()
    history = History()
    server.log = RememberingLog(server.log, history)
    feed = LiveFeed(server, history)
    watching = asyncio.create_task(feed.run())

    @router.api_route("/", methods=["GET", "HEAD"])
    async def index(request: Request) -> Response:
        return assets["index.html"].reply(request)

    @router.api_route("/favicon.ico", methods=["GET", "HEAD"])
    async def icon(request: Request) -> Response:
        return assets["icon.svg"].reply(request)

    @router.api_route("/page/{name}", methods=["GET", "HEAD"])
    async def asset(name: str, request: Request) -> Response:
        if name not in assets:
            raise ApiError(404, "not_found", f"The page has no file {name[:100]!r}.")
        return assets[name].reply(request)

    @router.get("/live")
    async def live(request: Request) -> Response:
        feed.check_room()
        if watching.done():
            watching.result()  # raises its error: a broken feed must not look like an idle engine
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        if feed.shows_all(key_of(request.headers)):
            events = feed.events()
        else:
            events = feed.own_events(getattr(request.state, "caller", None))
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    return router
