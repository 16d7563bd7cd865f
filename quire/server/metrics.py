"""Prometheus metrics. The routes and the gate report here; `/metrics` renders them.

The engine's counters arrive with its beats and are exported unchanged. Latencies are measured in the HTTP process, so
that they include what the client waits for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from quire.server.engine_metrics import EngineCollector
from quire.server.vllm_metrics import VllmCollector
from quire.types import Timing, Usage

if TYPE_CHECKING:
    from quire.client.fleet import Fleet

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
LOOP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """The metrics of one server in a registry of its own, so that one process can hold several servers."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._others = CollectorRegistry()  # metrics under other servers' names
        registry: dict[str, Any] = {"registry": self.registry}
        route = ("route",)
        self._replies = Counter(
            "quire_http_replies", "Replies by route and status", ("route", "method", "status"), **registry
        )
        self._reply_time = Histogram(
            "quire_http_seconds", "Seconds from a request to the end of its reply", route, buckets=SECONDS, **registry
        )
        self._open = Gauge("quire_http_open", "Open HTTP requests", **registry)
        self._failures = Counter("quire_failures", "Failed requests by route and code", ("route", "code"), **registry)
        self._cut = Counter("quire_cut_readers", "Replies ended because the client did not read", route, **registry)
        self._broken = Counter(
            "quire_streams_broken",
            "Streams that failed after their first event, by outcome",
            ("route", "outcome"),
            **registry,
        )
        self._disconnects = Counter(
            "quire_disconnects", "Clients that disconnected before the end of the reply", route, **registry
        )
        self._first_token = Histogram(
            "quire_ttft_seconds", "Seconds to the first token", route, buckets=SECONDS, **registry
        )
        self._per_token = Histogram(
            "quire_tpot_seconds", "Seconds per output token after the first", route, buckets=TOKEN_SECONDS, **registry
        )
        self._total = Histogram(
            "quire_e2e_seconds", "Seconds from a request to its last token", route, buckets=SECONDS, **registry
        )
        self._queue = Histogram(
            "quire_queue_seconds", "Seconds from a request to its admission", route, buckets=SECONDS, **registry
        )
        self._prompt = Counter("quire_prompt_tokens", "Prompt tokens", route, **registry)
        self._cached = Counter("quire_cached_tokens", "Prompt tokens found in the prefix cache", route, **registry)
        self._output = Counter("quire_output_tokens", "Tokens generated", route, **registry)
        self._loop_delay = Histogram(
            "quire_http_loop_delay_seconds",
            "Seconds by which the event loop ran a timer late",
            buckets=LOOP_SECONDS,
            **registry,
        )
        self._loop_computing = Histogram(
            "quire_http_loop_computing_seconds",
            "Processor seconds of this process within each delay of the event loop",
            buckets=LOOP_SECONDS,
            **registry,
        )

    def watch(self, fleet: Fleet, vllm_model: str | None = None) -> None:
        """Export the figures of the fleet's engines, each with the label of its replica. `vllm_model`: add vLLM's
        metrics, with this name of the model."""
        if vllm_model is not None:
            self._others.register(VllmCollector(self.registry, fleet, vllm_model))
        self.registry.register(EngineCollector(fleet))

    def render(self) -> bytes:
        return generate_latest(self._others) + generate_latest(self.registry)

    def http_opened(self) -> None:
        self._open.inc()

    def http_closed(self, route: str, method: str, status: int, seconds: float) -> None:
        self._open.dec()
        self._replies.labels(route, method, str(status)).inc()
        self._reply_time.labels(route).observe(seconds)

    def failed(self, route: str, code: str) -> None:
        self._failures.labels(route, code).inc()

    def cut_off(self, route: str) -> None:
        self._cut.labels(route).inc()

    def disconnected(self, route: str) -> None:
        self._disconnects.labels(route).inc()

    def stream_broke(self, route: str, outcome: str) -> None:
        self._broken.labels(route, outcome).inc()

    def first_token(self, route: str, seconds: float) -> None:
        self._first_token.labels(route).observe(seconds)

    def loop_delayed(self, delay: float, computing: float) -> None:
        self._loop_delay.observe(delay)
        self._loop_computing.observe(computing)

    def sample_ended(self, route: str, usage: Usage, timing: Timing, per_token: float | None, total: float) -> None:
        self._prompt.labels(route).inc(usage.prompt_tokens)
        self._cached.labels(route).inc(usage.cached_tokens)
        self._output.labels(route).inc(usage.completion_tokens)
        self._queue.labels(route).observe(timing.queue)
        self._total.labels(route).observe(total)
        if per_token is not None:
            self._per_token.labels(route).observe(per_token)
