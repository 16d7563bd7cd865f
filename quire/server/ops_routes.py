"""Routes for operators: probes, metrics, statistics, and the admin routes, which take the admin key."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query
from pydantic import Field
from starlette.responses import Response

from quire.engine.limits import SpeculationStats
from quire.server.http.encoding import to_json
from quire.server.http.route_parts import api_router
from quire.server.schemas import Body
from quire.server.state import Server
from quire.types import QuireError
from quire.types.control import ControlAction


def ops_router(server: Server, version: str) -> APIRouter:
    router = api_router(server, "Operation", "openai")

    @router.get("/health", response_model=None, include_in_schema=False)  # the name in other servers
    @router.get("/ping", response_model=None, include_in_schema=False)
    @router.post("/ping", response_model=None, include_in_schema=False)
    @router.get("/healthz", response_model=None)
    async def healthz() -> Response:
        """Alive: the engine gets past steps and, with work to do, computes tokens, or is being replaced. 503 means:
        restart the server."""
        health = server.health()
        return _json(health, 503 if health["status"] == "unhealthy" else 200)

    @router.get("/readyz", response_model=None)
    async def readyz() -> Response:
        """Ready for new requests: alive and not shutting down. 503 means: send them elsewhere."""
        health = server.health()
        if server.draining:
            health |= {"status": "draining", "problem": "The server is shutting down."}
        return _json(health, 200 if health["problem"] is None else 503)

    @router.get("/version")
    async def version_of() -> dict[str, str]:
        return {"version": version}

    @router.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(server.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/v1/stats")
    async def stats() -> dict[str, Any]:
        """The engine's counters and limits."""
        return stats_body(server)

    return router


def admin_router(server: Server) -> APIRouter:
    router = api_router(server, "Operation", "openai")

    @router.get("/admin/engine")
    async def engine() -> dict[str, Any]:
        """Everything about the engine process, for operators: memory plan and open requests."""
        live = [
            {
                "id": name,
                "prompt_tokens": one.request.prompt_len,
                "output_tokens": len(one.delivered),
                "priority": one.request.priority,
            }
            for name, one in islice(server.fleet.live(), 1000)
        ]
        client = server.fleet.lead.client
        return {**stats_body(server), "pid": client.pid, "memory": client.ready.memory, "live": live}

    @router.get("/admin/state")
    async def state() -> dict[str, Any]:
        """The state machines of the engine process and its loop: state, recent transitions, and their counts."""
        supervisor, client = server.fleet.lead.supervisor, server.fleet.lead.client
        return {
            "process": {
                "state": supervisor.states.state.value,
                "seconds": round(supervisor.states.age(), 3),
                "transitions": supervisor.states.counts,
                "history": [asdict(move) for move in supervisor.states.history],
            },
            "loop": {"state": client.beat.state, "transitions": client.beat.transitions},
            "restarts": supervisor.num_restarts,
            "resumed_requests": client.num_resumed,
            "suspects": client.num_suspects,
            "recovery_seconds": [round(seconds, 3) for seconds in supervisor.recovery_seconds],
            "peak_memory": supervisor.peak_memory,
            "cause": None if supervisor.cause is None else str(supervisor.cause),
        }

    @router.get("/admin/errors")
    async def errors(limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> dict[str, Any]:
        """The one queue of everything that went wrong, newest first."""
        queue = server.fleet.lead.supervisor.errors
        return {
            "total": queue.total,
            "counts": dict(queue.counts),
            "errors": [asdict(failure) for failure in queue.newest(limit)],
        }

    @router.post("/admin/check")
    async def check() -> dict[str, Any]:
        """Prove that every row, page and lease of the engine is accounted for."""
        checked = await server.fleet.lead.supervisor.check()
        return {
            "ok": checked.problem is None,
            "problem": checked.problem,
            "requests": checked.num_requests,
            "leaked_units": checked.num_leaked,
        }

    @router.post("/admin/weights")
    async def weights(body: WeightsBody) -> dict[str, Any]:
        """Put other weights of the same model in place of the present ones; streams go on."""
        return await _change(server, "weights", {"model": body.model}, model=body.model, in_flight=body.in_flight)

    @router.post("/admin/precision")
    async def precision(body: PrecisionBody) -> dict[str, Any]:
        """Quantize the weights anew; streams go on. If that loses too much, the old ones stay."""
        quant = "none" if body.weights == "auto" else body.weights
        return await _change(server, "precision", {"quant": quant}, weights=body.weights, max_loss=body.max_loss)

    @router.post("/admin/sleep")
    async def sleep(body: SleepBody) -> dict[str, Any]:
        """Give memory back. Requests wait until the model wakes."""
        return await _change(server, "sleep", {}, cache=body.cache)

    @router.post("/admin/wake")
    async def wake() -> dict[str, Any]:
        return await _change(server, "wake", {})

    @router.post("/admin/cancel")
    async def cancel_all() -> dict[str, Any]:
        """End every open generation; their clients get an error."""
        return {"cancelled": server.fleet.cancel_all()}

    return router


class WeightsBody(Body):
    model: Annotated[str, Field(min_length=1, max_length=4096)]  # folder or GGUF file on the server's machine
    in_flight: Literal["keep", "recompute", "end"] = "keep"  # what open requests do with what they have computed


class PrecisionBody(Body):
    weights: Annotated[str, Field(min_length=1, max_length=32)]
    max_loss: Annotated[float, Field(ge=0, le=100)] = 0.5  # nats per token on a fixed text


class SleepBody(Body):
    cache: Literal["keep", "drop"] = "keep"


async def _change(server: Server, action: ControlAction, settings: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Let every engine carry out a command. `settings`: what later engines start with once it has succeeded."""
    result: dict[str, Any] = {}
    for replica in server.fleet.replicas:
        try:
            result = await replica.supervisor.control(action, **fields)
        except QuireError as error:
            replica.supervisor.errors.put("engine", error.code, str(error))
            raise
        replica.supervisor.set_for_next(settings)
    server.log.write("info", action, **{name: value for name, value in result.items() if value is not None})
    return result


def stats_body(server: Server) -> dict[str, Any]:
    client = server.fleet.lead.client
    return {
        "engine": msgspec.to_builtins(_as_dict(client.beat)),
        "limits": client.ready.limits,
        "model": {
            "names": server.names,
            "dtype": client.ready.dtype,
            "max_model_len": server.edge.max_len,
            "vocab_size": server.edge.vocab_size,
            "tool_format": server.chat.tool_format,
        },
        "start": server.start_seconds,
        "http": {"open": server.open_replies, "live": server.fleet.num_live, "draining": server.draining},
    }


_NESTED = ("groups", "recent", "speculation", "tiers")


def _as_dict(beat: Any) -> dict[str, Any]:
    fields = {name: getattr(beat, name) for name in beat.__struct_fields__ if name not in _NESTED}
    groups = [
        {"name": g.name, "units": g.num_units, "available": g.num_available, "cached": g.num_cached}
        for g in beat.groups
    ]
    recent = [step._asdict() for step in beat.recent]
    tiers = [msgspec.structs.asdict(tier) for tier in beat.tiers]
    speculation = _speculation(beat.speculation)
    return {**fields, "groups": groups, "recent": recent, "tiers": tiers, "speculation": speculation}


def _speculation(stats: SpeculationStats | None) -> dict[str, Any] | None:
    """Return the counters of speculation, by proposer and position; None without it."""
    if stats is None:
        return None
    proposers = [msgspec.structs.asdict(counts) for counts in stats.proposers]
    return {**msgspec.structs.asdict(stats), "proposers": {one.pop("name"): one for one in proposers}}


def _json(value: Any, status: int) -> Response:
    return Response(to_json(value), status, media_type="application/json")
