"""Probes, metrics, statistics and the admin routes: what operators and their tools ask."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from quire.server.encoding import to_json
from quire.server.route_parts import error_docs
from quire.server.state import Server


def ops_router(server: Server) -> APIRouter:
    router = APIRouter(tags=["Operation"], responses=error_docs("openai"))

    @router.get("/health", response_model=None, include_in_schema=False)  # what other servers' tools ask for
    @router.get("/healthz", response_model=None)
    async def healthz() -> Response:
        """Alive: the engine gets past steps and, with work to do, computes tokens. 503 means: restart it."""
        health = server.health()
        return _json(health, 200 if health["problem"] is None else 503)

    @router.get("/readyz", response_model=None)
    async def readyz() -> Response:
        """Ready for new requests: alive and not shutting down. 503 means: send them elsewhere."""
        health = server.health()
        if server.draining:
            health |= {"status": "draining", "problem": "The server is shutting down."}
        return _json(health, 200 if health["problem"] is None else 503)

    @router.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(server.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/v1/stats")
    async def stats() -> dict[str, Any]:
        """The engine's counters and limits."""
        return stats_body(server)

    @router.get("/admin/engine")
    async def engine() -> dict[str, Any]:
        """Everything about the engine process, for operators: memory plan and open requests."""
        live = [
            {"id": name, "prompt_tokens": one.request.prompt_len, "output_tokens": len(one.delivered),
             "priority": one.request.priority}
            for name, one in list(server.client.live.items())[:1000]
        ]  # fmt: skip
        ready = server.client.ready
        return {**stats_body(server), "pid": server.client.pid, "memory": ready.memory, "live": live}

    @router.post("/admin/cancel")
    async def cancel_all() -> dict[str, Any]:
        """End every open generation; their clients get an error."""
        ids = list(server.client.live)
        server.client.cancel(ids)
        return {"cancelled": len(ids)}

    return router


def stats_body(server: Server) -> dict[str, Any]:
    client = server.client
    return {
        "engine": msgspec.to_builtins(_as_dict(client.beat)),
        "limits": client.ready.limits,
        "model": {"names": server.names, "dtype": client.ready.dtype, "max_model_len": server.edge.max_len,
                  "vocab_size": server.edge.vocab_size, "tool_format": server.chat.tool_format},
        "http": {"open": server.open_replies, "live": len(client.live), "draining": server.draining},
    }  # fmt: skip


def _as_dict(beat: Any) -> dict[str, Any]:
    fields = {name: getattr(beat, name) for name in beat.__struct_fields__ if name not in ("groups", "recent")}
    groups = [
        {"name": g.name, "units": g.num_units, "available": g.num_available, "cached": g.num_cached}
        for g in beat.groups
    ]
    recent = [step._asdict() for step in beat.recent]
    return {**fields, "groups": groups, "recent": recent}


def _json(value: Any, status: int) -> Response:
    return Response(to_json(value), status, media_type="application/json")
