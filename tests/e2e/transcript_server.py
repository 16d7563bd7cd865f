"""A server with OpenAI's chat API that plays a transcript: each request gets the next prepared answer, streamed.

An answer is a text, a dict with `content`, `reasoning` and `calls` [(name, arguments)], or `HANG`, which sends a few
words and then nothing until the client goes away.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HANG = {"hang": True}


@dataclass
class TranscriptServer:
    """A running server: its URL, the answers that are left, and the requests that came."""

    answers: list[Any]
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)


@contextmanager
def transcript_server(answers: list[Any], context_len: int = 32_000) -> Iterator[TranscriptServer]:
    state = TranscriptServer(answers)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": "scripted", "max_model_len": context_len}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.asked.append(asked)
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            with suppress(OSError):
                self._play(state.answers.pop(0) if state.answers else "(the transcript is over)", asked)
            self.close_connection = True

        def _play(self, answer: Any, asked: dict[str, Any]) -> None:
            answer = {"content": answer} if isinstance(answer, str) else answer
            if answer.get("hang"):
                self._event({"choices": [{"index": 0, "delta": {"content": "I think about it"}}]})
                while not state.stop.wait(0.05):
                    self.wfile.write(b": waiting\n\n")
                    self.wfile.flush()
                return
            for key, name in (("reasoning", "reasoning_content"), ("content", "content")):
                for start in range(0, len(answer.get(key) or ""), 9):
                    self._event({"choices": [{"index": 0, "delta": {name: answer[key][start : start + 9]}}]})
            for index, (name, arguments) in enumerate(answer.get("calls") or ()):
                call_id = f"call_{len(state.asked)}_{index}"
                function = {
                    "name": name,
                    "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
                }
                call = {"index": index, "id": call_id, "type": "function", "function": function}
                self._event({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})
            reason = "tool_calls" if answer.get("calls") else "stop"
            self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
            size = len(json.dumps(asked["messages"])) // 4
            usage = {"prompt_tokens": size, "completion_tokens": 20}
            self._event({"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": size // 2}}})
            self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, value: Any) -> None:
            self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
            self.wfile.flush()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield state
    finally:
        state.stop.set()
        server.shutdown()
        server.server_close()
