"""Spans of requests in the form of OpenTelemetry: one for the request, and one for each part of its time.

The gate makes them when a reply has ended. The caller's trace goes on if it sent a `traceparent` header.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SERVER_KIND, INTERNAL_KIND = 2, 1
ERROR_STATUS = 2
NANO = 1_000_000_000
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
    "/api/embed": "embeddings",
    "/infill": "text_completion",
}
_PARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


@dataclass(frozen=True, slots=True)
class TraceParent:
    """The caller's place in its trace."""

    trace_id: str
    span_id: str
    is_sampled: bool


def read_parent(header: str | None) -> TraceParent | None:
    """The W3C trace context of a request; None without a valid one."""
    found = _PARENT.fullmatch((header or "").strip())
    if found is None or not int(found[1], 16) or not int(found[2], 16):
        return None
    return TraceParent(found[1], found[2], bool(int(found[3], 16) & 1))


@dataclass(slots=True)
class FinishedRequest:
    """What the gate knows of a request when its reply has ended. Times are seconds of one clock."""

    route: str
    method: str
    path: str
    status: int
    request_id: str
    model: str
    parent: TraceParent | None
    start: float
    end: float
    submitted: float | None = None  # when its prompts went to the engine
    totals: Mapping[str, Any] = field(default_factory=dict)
    outcome: str | None = None


def spans_of(request: FinishedRequest, to_unix: float) -> list[dict[str, Any]]:
    """The spans in OTLP's JSON form. `to_unix` turns the clock's seconds into Unix time."""
    trace = request.parent.trace_id if request.parent is not None else secrets.token_hex(16)
    root = secrets.token_hex(8)

    def span(
        name: str, begin: float, end: float, parent: str, kind: int, attributes: Mapping[str, Any]
    ) -> dict[str, Any]:
        made: dict[str, Any] = {
            "traceId": trace,
            "spanId": root if kind == SERVER_KIND else secrets.token_hex(8),
            "name": name,
            "kind": kind,
            "startTimeUnixNano": str(int((begin + to_unix) * NANO)),
            "endTimeUnixNano": str(int((max(begin, end) + to_unix) * NANO)),
            "attributes": [_attribute(key, value) for key, value in attributes.items() if value is not None],
        }
        return {**made, "parentSpanId": parent} if parent else made

    parent = request.parent.span_id if request.parent is not None else ""
    whole = span(
        f"{request.method} {request.route}", request.start, request.end, parent, SERVER_KIND, _attributes(request)
    )
    if request.status >= 500 or request.outcome is not None:
        whole["status"] = {"code": ERROR_STATUS, "message": request.outcome or str(request.status)}
    children = [span(name, begin, end, root, INTERNAL_KIND, {}) for name, begin, end in _parts(request)]
    return [whole, *children]


def _parts(request: FinishedRequest) -> list[tuple[str, float, float]]:
    """The parts of a request's time: reading and rendering, waiting, prefill, decode."""
    if request.submitted is None:
        return []
    submitted, end = request.submitted, request.end
    first, queue = request.totals.get("first_token_seconds"), request.totals.get("queue_seconds")
    parts = [("prepare", request.start, submitted)]
    if first is None:
        return [*parts, ("wait", submitted, end)]
    began = min(end, submitted + first)
    admitted = min(began, submitted + (queue or 0.0))
    return [*parts, ("wait", submitted, admitted), ("prefill", admitted, began), ("decode", began, end)]


def _attributes(request: FinishedRequest) -> dict[str, Any]:
    totals, operation = request.totals, OPERATIONS.get(request.route)
    found: dict[str, Any] = {
        "http.request.method": request.method,
        "http.route": request.route,
        "url.path": request.path,
        "http.response.status_code": request.status,
        "quire.request_id": request.request_id,
        "error.type": request.outcome or (str(request.status) if request.status >= 400 else None),
    }
    if operation is None:
        return found
    return {
        **found,
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": request.model,
        "gen_ai.usage.input_tokens": totals.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": totals.get("completion_tokens"),
        "gen_ai.usage.cache_read.input_tokens": totals.get("cached_tokens"),
        "gen_ai.server.time_to_first_token": totals.get("first_token_seconds"),
    }


def _attribute(key: str, value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"key": key, "value": {"boolValue": value}}
    if isinstance(value, int):
        return {"key": key, "value": {"intValue": str(value)}}
    if isinstance(value, float):
        return {"key": key, "value": {"doubleValue": value}}
    return {"key": key, "value": {"stringValue": str(value)}}
