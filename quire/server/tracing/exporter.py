"""Sends spans to an OpenTelemetry collector by OTLP over HTTP, as JSON. A thread sends, so that no request waits.

Spans are dropped, and counted, when the collector is slower than the requests or does not answer.
"""

from __future__ import annotations

import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from quire.server.http.encoding import to_json
from quire.server.tracing.spans import FinishedRequest, spans_of

MAX_WAITING = 4096  # requests whose spans are not sent yet
MAX_SENT = 256  # requests in one message
PAUSE = 1.0  # seconds in which requests are gathered
TIMEOUT = 10.0


class SpanExporter:
    """Exports the spans of finished requests."""

    def __init__(self, endpoint: str, version: str, log: Callable[..., None], pause: float = PAUSE):
        self._url = endpoint.rstrip("/")
        if not self._url.endswith("/v1/traces"):
            self._url += "/v1/traces"
        self._log, self._pause = log, pause
        self._resource = {
            "attributes": [
                {"key": "service.name", "value": {"stringValue": "quire"}},
                {"key": "service.version", "value": {"stringValue": version}},
            ]
        }
        self._waiting: queue.Queue[FinishedRequest | None] = queue.Queue(MAX_WAITING)
        self._to_unix = time.time() - time.monotonic()
        self.num_dropped = 0
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="quire-spans", daemon=True)
        self._thread.start()

    def add(self, request: FinishedRequest) -> None:
        """Export a request, unless its caller's trace is not sampled."""
        if request.parent is not None and not request.parent.is_sampled:
            return
        try:
            self._waiting.put_nowait(request)
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Send what is left."""
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(TIMEOUT)

    def _run(self) -> None:
        last = False
        while not last:
            requests: list[FinishedRequest] = []
            until = float("inf")
            while len(requests) < MAX_SENT:
                try:
                    found = self._waiting.get(timeout=None if not requests else max(0.0, until - time.monotonic()))
                except queue.Empty:
                    break
                if found is None:
                    last = True
                    break
                requests.append(found)
                until = min(until, time.monotonic() + self._pause)
            if requests:
                self._send(requests)

    def _send(self, requests: list[FinishedRequest]) -> None:
        spans: list[dict[str, Any]] = [span for request in requests for span in spans_of(request, self._to_unix)]
        scope = {"scope": {"name": "quire"}, "spans": spans}
        body = to_json({"resourceSpans": [{"resource": self._resource, "scopeSpans": [scope]}]})
        try:
            message = urllib.request.Request(self._url, body, {"content-type": "application/json"}, method="POST")
            with urllib.request.urlopen(message, timeout=TIMEOUT) as reply:
                reply.read()
            self._failed = False
        except (OSError, ValueError, urllib.error.URLError) as error:
            self.num_dropped += len(requests)
            if not self._failed:  # said once until it works again
                self._log("warning", "spans not sent", url=self._url, error=str(error))
            self._failed = True
