"""State shared by all routes of one server: the fleet of engines, the edge, limits, counters and the drain status."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.client.fleet import Fleet, Replica
from quire.config import Config
from quire.edge import Edge
from quire.engine.states import ProcessState
from quire.files.source import ModelFiles
from quire.server.chat import ChatPrompts
from quire.server.generation import Generation
from quire.server.http.bodies import HeldBodies
from quire.server.http.errors import INTERNAL_CODES, ApiError
from quire.server.http.keys import KeyRing, RateLimits
from quire.server.logs import Log
from quire.server.metrics import Metrics
from quire.server.store import ResponseStore
from quire.server.streams.kept_streams import KeptStreams
from quire.server.tracing.exporter import SpanExporter
from quire.types import QuireError

RANKS = {"ok": 0, "recovering": 1, "unhealthy": 2}  # states of health in ascending order of severity


class Background(Protocol):
    """Work beside the requests of clients."""

    def start(self) -> None: ...

    async def stop(self) -> None: ...


@dataclass(slots=True)
class Server:
    """The state that all routes share."""

    config: Config
    fleet: Fleet
    edge: Edge
    metrics: Metrics
    generation: Generation
    chat: ChatPrompts
    held: HeldBodies
    files: ModelFiles  # the served model's files
    store: ResponseStore
    names: list[str]  # the model's names; replies show the first
    keys: KeyRing
    admin_keys: KeyRing
    rates: RateLimits
    log: Log
    streams: KeptStreams
    created: int  # start of the server, Unix seconds
    batches: Background | None = None  # set by the app, whose routes it calls
    spans: SpanExporter | None = None  # None: no traces
    start_seconds: dict[str, float] = field(default_factory=dict)  # of each phase of the start
    draining: bool = False
    at_once: bool = False  # second stop signal: do not drain
    open_replies: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def reply_opened(self) -> None:
        """Count a reply that must end before the server does."""
        self.open_replies += 1
        self.idle.clear()

    def reply_closed(self) -> None:
        self.open_replies -= 1
        if not self.open_replies:
            self.idle.set()

    @property
    def name(self) -> str:
        return self.names[0]

    def check_model(self, name: str | None) -> str:
        """The model name for the reply. `*` among the names accepts every name. Raises for an unknown model."""
        if name is not None and name in self.edge.adapters:
            return name
        if name is None or name in self.names:
            return name or self.name
        if "*" in self.names:
            return name
        shown = name if len(name) <= 200 else name[:197] + "..."
        names = ", ".join(map(repr, [*self.names, *self.edge.adapters]))
        message = f"The model {shown!r} is not served here. This server has {names}."
        raise ApiError(404, "model_not_found", message, "model")

    def note_failure(self, route: str, request_id: str, error: QuireError) -> None:
        """Count a failed request, and log details that are hidden from clients."""
        self.metrics.failed(route, error.code)
        if error.code == "detokenize_failed":  # not counted by the engine
            self.fleet.lead.supervisor.errors.put("request", error.code, str(error), [request_id])
        if error.code in INTERNAL_CODES:
            self.log.write("error", "request failed", id=request_id, code=error.code, error=str(error))

    def health(self) -> dict[str, Any]:
        """Health of the engine that is worst off. While a supervisor replaces its engine, the server is not ready but
        healthy."""
        return max((self._health_of(replica) for replica in self.fleet.replicas), key=lambda one: RANKS[one["status"]])

    def _health_of(self, replica: Replica) -> dict[str, Any]:
        """Health derived from the progress of one engine."""
        client, supervisor = replica.client, replica.supervisor
        patience, state = self.config.server.stall_timeout, supervisor.states.state
        beat_age, progress_age = client.beat_age(), client.progress_age()
        status, problem = "ok", None
        if client.failure is not None or state is ProcessState.FAILED:
            status, problem = "unhealthy", self._shown(client.failure or supervisor.cause)
        elif state is not ProcessState.READY:
            status, problem = "recovering", f"The engine is being replaced: {self._shown(supervisor.cause)}"
        elif beat_age > patience:
            status, problem = "unhealthy", f"The engine has not got past a step for {beat_age:.0f} s."
        elif progress_age > patience:
            what = f"The engine has open requests and computed no token for {progress_age:.0f} s."
            status, problem = "unhealthy", what
        return {
            "status": status,
            "problem": problem,
            "engine": state.value,
            "restarts": supervisor.num_restarts,
            "step_age_seconds": round(beat_age, 3),
            "progress_age_seconds": round(progress_age, 3),
            "steps": client.beat.steps,
            "tokens": client.beat.sampled_tokens,
        }

    @staticmethod
    def _shown(error: QuireError | None) -> str:
        """The part of the status for probes, without internals."""
        if error is None or error.code in INTERNAL_CODES:
            return "The engine failed; the server's log says why."
        return str(error)
