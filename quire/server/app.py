"""The HTTP application: the routers of both dialects, the gate in front of them, and error handlers for the dialects.

`create_app` builds it for a `Server`; `run` starts the server. Generation is not known here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp

from quire.server.adapter_routes import adapters_router
from quire.server.anthropic.routes import anthropic_router
from quire.server.batches.batch_routes import batch_router
from quire.server.batches.database import BatchDatabase
from quire.server.batches.runner import BatchRunner
from quire.server.http.encoding import to_json
from quire.server.http.errors import ApiError, dialect_of, error_response, from_quire_error, from_validation
from quire.server.http.gate import Gate, route_label
from quire.server.infill.routes import infill_router
from quire.server.ollama.routes import ollama_router
from quire.server.openai.embeddings import embeddings_router
from quire.server.openai.response_routes import responses_router
from quire.server.openai.routes import openai_router
from quire.server.ops_routes import admin_router, ops_router
from quire.server.page.routes import page_router
from quire.server.session_routes import sessions_router
from quire.server.state import Server
from quire.server.streams.stream_routes import stream_router
from quire.server.text_routes import text_router
from quire.types import QuireError

ENDLESS = frozenset({"/live", "/v1/streams/{stream_id}"})
HTTP_CODES = {404: "unknown_route", 405: "method_not_allowed"}


def create_app(server: Server, version: str) -> ASGIApp:
    app = FastAPI(
        title="Quire", version=version, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    database = BatchDatabase(server.config.server.batch_store, server.config.server.max_batch_bytes)
    server.batches = BatchRunner(server, database, app)
    routers = (
        ops_router(server, version),
        admin_router(server),
        openai_router(server),
        responses_router(server),
        stream_router(server),
        batch_router(server, database, server.batches),
        embeddings_router(server),
        infill_router(server),
        ollama_router(server),
        anthropic_router(server),
        text_router(server),
        sessions_router(server),
        adapters_router(server),
        page_router(server),
        _document_router(app),
    )
    for router in routers:
        _answer_head(router)
        app.include_router(router)
    _handle_errors(app, server, [route for router in routers for route in router.routes])
    return Gate(app, server)


def _answer_head(router: APIRouter) -> None:
    """Answer HEAD on every finite GET route; uvicorn omits the body."""
    for route in list(router.routes):
        methods = route.methods or set() if isinstance(route, APIRoute) else set()
        if isinstance(route, APIRoute) and "GET" in methods and "HEAD" not in methods and route.path not in ENDLESS:
            router.add_api_route(
                route.path,
                route.endpoint,
                methods=["HEAD"],
                include_in_schema=False,
                response_model=route.response_model,
            )


def _handle_errors(app: FastAPI, server: Server, routes: Sequence[BaseRoute]) -> None:
    def show(request: Request, error: ApiError) -> Response:
        return error_response(dialect_of(request.url.path), error, request.state.request_id)

    def answer(request: Request, error: ApiError) -> Response:
        server.metrics.failed(route_label(request.scope), error.code)
        return show(request, error)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        """Send the reply only: Starlette raises the exception again, and the gate counts and logs it."""
        return show(request, ApiError(500, "internal_error", "The server made a mistake. It has been logged."))

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return answer(request, error)

    @app.exception_handler(QuireError)
    async def quire_error(request: Request, error: QuireError) -> Response:
        route = route_label(request.scope)
        server.note_failure(route, request.state.request_id, error)
        return show(request, from_quire_error(error, server.generation.retry_after(), route))

    @app.exception_handler(RequestValidationError)
    async def wrong_body(request: Request, error: RequestValidationError) -> Response:
        return answer(request, from_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        cause = error.__cause__  # FastAPI wraps every exception raised while it reads a body as a JSON error
        if isinstance(cause, ApiError):
            return answer(request, cause)
        if isinstance(cause, QuireError):
            return await quire_error(request, cause)
        code = HTTP_CODES.get(error.status_code, "invalid_request")
        path = request.url.path[:200]
        message = str(error.detail)
        headers: dict[str, str] = {}
        if error.status_code == 400:  # FastAPI's only detail for a body that can't be read
            code, message = "invalid_json", "The body is not valid JSON."
        elif error.status_code == 404:
            message = f"There is no route {path}. GET /openapi.json lists them all."
        elif error.status_code == 405:
            allowed = ", ".join(_methods_of(routes, request.scope))
            message, headers["allow"] = f"{path} does not take {request.method}, only {allowed}.", allowed
        return answer(request, ApiError(error.status_code, code, message, headers=headers))


def _methods_of(routes: Sequence[BaseRoute], scope: Any) -> list[str]:
    """All methods of a path. Several routes may share it, and Starlette reports only the first."""
    methods: set[str] = set()
    for route in routes:
        if route.matches(scope)[0] is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return sorted(methods)


def _document_router(app: FastAPI) -> APIRouter:
    """`GET /openapi.json`. Making the document takes a quarter of a second, so a thread does it, once."""
    router, lock, made = APIRouter(), asyncio.Lock(), list[bytes]()

    @router.get("/openapi.json", include_in_schema=False)
    async def document() -> Response:
        async with lock:
            if not made:
                made.append(await asyncio.to_thread(_make_document, app))
        return Response(made[0], media_type="application/json")

    return router


def _make_document(app: FastAPI) -> bytes:
    """All routes as OpenAPI, without the 422 that FastAPI adds to every route with a body: the server answers 400."""
    document = app.openapi()
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    return to_json(document)
