"""Helpers of all routers: the generation job of a request, and errors in the OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from quire.server.generation import GenerationJob
from quire.server.http.bodies import body_route
from quire.server.http.errors import ApiError, Dialect, bad_request, error_body
from quire.server.http.gate import route_label
from quire.server.schemas import Service
from quire.server.state import Server
from quire.types import SamplingParams

_STATUSES = {
    400: ("invalid_value", "The request is not valid."),
    401: ("missing_api_key", "No API key was sent."),
    403: ("permission", "This key may not do that."),
    404: ("not_found", "There is no such thing here."),
    405: ("method_not_allowed", "This route takes other methods."),
    413: ("body_too_large", "The body is too large."),
    415: ("unsupported_media_type", "The body must be application/json."),
    429: ("queue_full", "Too many requests; see Retry-After."),
    500: ("internal_error", "The server made a mistake."),
    503: ("engine_lost", "The engine is not there; see Retry-After."),
    504: ("deadline_exceeded", "The request ran out of time."),
}


def api_router(server: Server, tag: str, dialect: Dialect) -> APIRouter:
    """A router that reads bodies within bounds."""
    route = body_route(server.held, server.chat.check_body, lenient=server.config.server.lenient)
    return APIRouter(tags=[tag], responses=error_docs(dialect), route_class=route)


def job_of(request: Request, body: Service, prompts: list[list[int]], params: SamplingParams) -> GenerationJob:
    budget = getattr(request.state, "budget", None)
    return GenerationJob(
        prompts,
        params,
        timeout=body.timeout,
        priority=body.priority,
        salt=cache_salt(request, body.salt()),
        route=route_label(request.scope),
        request_id=request.state.request_id,
        model=body.model,
        on_usage=None if budget is None else budget.take_tokens,
    )


def check_verbosity(server: Server, verbosity: str | None, param: str) -> None:
    """Refuse a verbosity that the model's chat template can't express."""
    if verbosity not in (None, "medium") and not server.chat.reads("verbosity"):
        message = f"This model's chat template knows no verbosity. Ask for {verbosity!r} in the prompt instead."
        raise bad_request("unsupported_parameter", message, param)


def cache_salt(request: Request, own: bytes) -> bytes:
    """The salt of the prefix cache: prompts share prefixes only within one key and one `cache_salt`. Otherwise the time
    to the first token would reveal other tenants' prompts."""
    return getattr(request.state, "tenant", b"") + own


def error_docs(dialect: Dialect) -> dict[int | str, dict[str, Any]]:
    """Statuses of a route for the OpenAPI document, each with an example."""
    docs: dict[int | str, dict[str, Any]] = {}
    for status, (code, message) in _STATUSES.items():
        example = error_body(dialect, ApiError(status, code, message))
        content = {"application/json": {"schema": {"type": "object"}, "example": example}}
        docs[status] = {"description": message, "content": content}
    return docs
