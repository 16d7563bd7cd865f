"""Traces of requests, as an OpenTelemetry collector receives them."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from quire.server.tracing.exporter import SpanExporter
from quire.server.tracing.spans import FinishedRequest, read_parent
from tests.e2e.conftest import start, stub_command
from tests.e2e.test_security import client_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"messages": [{"role": "user", "content": "one two"}]}


class Collector(ThreadingHTTPServer):
    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                assert self.path == "/v1/traces" and self.headers["content-type"] == "application/json"
                for resource in body["resourceSpans"]:
                    for scope in resource["scopeSpans"]:
                        collector.spans += scope["spans"]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


def attributes(span: dict[str, Any]) -> dict[str, str]:
    return {one["key"]: next(iter(one["value"].values())) for one in span["attributes"]}


def test_a_trace_per_request(model_here: None) -> None:
    collector = Collector()
    started = start(stub_command("--otel-endpoint", f"http://127.0.0.1:{collector.server_port}"))
    with client_of(started, None) as client:
        sampled = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
        path = "/v1/chat/completions"
        assert client.post(path, json={**BODY, "stream": True}, headers=sampled).status_code == 200
        client.post(path, json=BODY, headers={"traceparent": f"00-{TRACE}-{SPAN}-00"})
        assert client.post(path, json={**BODY, "temperature": -1}).status_code == 400
        assert client.get("/healthz").status_code == 200
    assert started.stop() == 0, "what is left is sent at the end"
    roots = [span for span in collector.spans if span["kind"] == 2]
    assert [attributes(span)["http.response.status_code"] for span in roots] == ["200", "400"]
    good, bad = roots
    assert (good["traceId"], good["parentSpanId"], good["name"]) == (TRACE, SPAN, "POST /v1/chat/completions")
    about = attributes(good)
    assert about["gen_ai.operation.name"] == "chat" and about["gen_ai.usage.output_tokens"] == "3"
    parts = [span for span in collector.spans if span.get("parentSpanId") == good["spanId"]]
    assert [span["name"] for span in parts] == ["prepare", "wait", "prefill", "decode"]
    times = [int(span[name]) for span in parts for name in ("startTimeUnixNano", "endTimeUnixNano")]
    assert times == sorted(times) and all(span["traceId"] == TRACE for span in parts)
    assert int(good["startTimeUnixNano"]) <= times[0] and times[-1] <= int(good["endTimeUnixNano"])
    assert attributes(bad)["error.type"] == "400" and "parentSpanId" not in bad and bad["traceId"] != TRACE
    collector.shutdown()


def test_a_trace_context_is_read_strictly() -> None:
    assert read_parent(f"00-{TRACE}-{SPAN}-01") is not None
    for wrong in (None, "", "x", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"01-{TRACE}-{SPAN}-01"):
        assert read_parent(wrong) is None


def test_a_collector_that_is_not_there_costs_spans_only() -> None:
    said: list[str] = []
    exporter = SpanExporter("http://127.0.0.1:9", "1", lambda level, what, **_: said.append(what), pause=0.0)
    for _ in range(3):
        exporter.add(FinishedRequest("/r", "POST", "/r", 200, "id", "m", None, 1.0, 2.0))
    exporter.close()
    assert exporter.num_dropped == 3 and said == ["spans not sent"]
