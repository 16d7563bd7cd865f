"""Any server with OpenAI's chat API: Quire's own, llama.cpp's or another. Standard library only.

One connection per request. Leaving a stream closes its connection, which cancels the request on every server known.
"""

from __future__ import annotations

import http.client
import json
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from quire.agent.engines.seam import AnswerStream, ModelAnswer, ModelCall, Question, ReasoningPiece, TextPiece
from quire.types import QuireError

MAX_EVENT = 16 << 20  # bytes of one event of a stream, or of a reply
CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 600.0  # maximum time without a byte from the server
_SAMPLING = {"max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos"}


class RemoteEngine:
    """Implements `ChatEngine`. `url` may end with /v1 or not."""

    def __init__(
        self, url: str, *, model: str | None = None, api_key: str | None = None, takes_tools: bool = True
    ) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise QuireError(
                "usage", f"{url!r:.200} is not the URL of a server.", "It looks like http://127.0.0.1:8000."
            )
        path = parts.path.rstrip("/")
        self._tls, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._prefix = path if path.endswith("/v1") else f"{path}/v1"
        self._key = api_key
        self.takes_tools = takes_tools  # a server does not say whether its template shows tools to the model
        listed = self._models()
        self.name = model or (str(listed[0].get("id")) if listed else "default")
        self.context_len = _context_len(listed, self.name)

    def ask(self, question: Question) -> AnswerStream:
        started = time.monotonic()
        connection = self._connect(ANSWER_SECONDS)
        reader = _ChatStream(started)
        try:
            body = self._body(question)
            for event in _events(self._post(connection, body)):
                yield from reader.take(event)
            if reader.is_empty:  # llama-cpp-python's reply to what it can't stream, errors among it
                connection.close()
                connection = self._connect(ANSWER_SECONDS)
                del body["stream"], body["stream_options"]
                yield from reader.take_whole(self._post(connection, body).read(MAX_EVENT))
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()
        return reader.answer()

    def count(self, question: Question) -> int | None:
        return None

    def keep(self, question: Question) -> None:
        pass  # the server decides what it keeps

    def models(self) -> list[str]:
        return [str(one.get("id")) for one in self._models()]

    def switch(self, name: str) -> None:
        listed = self._models()
        known = [str(one.get("id")) for one in listed]
        if known and name not in known:
            what = f"The server has no model {name!r:.100}."
            raise QuireError("unknown_model", what, f"It has {', '.join(known[:20])}.")
        self.name, self.context_len = name, _context_len(listed, name)

    def close(self) -> None:
        pass

    def _body(self, question: Question) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.name,
            "messages": question.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {name: value for name, value in question.sampling.items() if name in _SAMPLING and value is not None}
        if question.tools and self.takes_tools:
            body["tools"] = [_with_strict(tool) for tool in question.tools] if question.strict else question.tools
            choice = question.tool_choice
            body["tool_choice"] = {"type": "function", "function": {"name": choice}} if question.is_pinned else choice
            if question.is_pinned:
                body["parallel_tool_calls"] = False
        return body

    def _connect(self, seconds: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
        except OSError as error:
            raise self._unreachable(error) from error
        if connection.sock is not None:
            connection.sock.settimeout(seconds)
        return connection

    def _post(self, connection: http.client.HTTPConnection, body: dict[str, Any]) -> http.client.HTTPResponse:
        connection.request("POST", f"{self._prefix}/chat/completions", json.dumps(body).encode(), self._headers())
        reply = connection.getresponse()
        if reply.status != 200:
            raise _refusal(reply.status, reply.read(MAX_EVENT))
        return reply

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        return headers | ({"Authorization": f"Bearer {self._key}"} if self._key else {})

    def _models(self) -> list[dict[str, Any]]:
        connection = self._connect(CONNECT_SECONDS)
        try:
            connection.request("GET", f"{self._prefix}/models", headers=self._headers())
            reply = connection.getresponse()
            data = reply.read(MAX_EVENT)
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()
        if reply.status in (401, 403):
            raise _refusal(reply.status, data)
        with suppress(ValueError, AttributeError):
            found = json.loads(data).get("data")
            return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
        return []

    def _unreachable(self, error: Exception) -> QuireError:
        place = f"{self._host}:{self._port or (443 if self._tls else 80)}"
        return QuireError(
            "unreachable", f"The server {place} failed: {error or type(error).__name__}.", "Is it running?"
        )


class _ChatStream:
    """Collects the events of one streamed answer."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._answer = ModelAnswer(finish_reason="")
        self._calls: dict[int, ModelCall] = {}
        self._num_pieces = 0
        self.is_empty = True  # no event came

    def take(self, event: dict[str, Any]) -> Iterator[TextPiece | ReasoningPiece]:
        self.is_empty = False
        if error := event.get("error"):
            message = error.get("message") if isinstance(error, dict) else error
            raise QuireError("request_failed", f"The server ended the answer: {message}")
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._take_usage(usage)
        for choice in event.get("choices") or ():
            if choice.get("finish_reason"):
                self._answer.finish_reason = str(choice["finish_reason"])
            yield from self._take_delta(choice.get("delta") or {})

    def take_whole(self, data: bytes) -> Iterator[TextPiece | ReasoningPiece]:
        """Takes a reply that is not streamed."""
        try:
            whole = json.loads(data)
            choice = whole["choices"][0]
            message = choice["message"]
            calls = [{**call, "index": index} for index, call in enumerate(message.get("tool_calls") or ())]
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            raise QuireError("request_failed", f"The server sent no answer: {data[:100]!r}.") from None
        delta = {**message, "tool_calls": calls}
        yield from self.take({"choices": [{"delta": delta, "finish_reason": choice.get("finish_reason") or "stop"}]})
        yield from self.take({"usage": whole.get("usage")})

    def _take_usage(self, usage: dict[str, Any]) -> None:
        self._answer.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        self._answer.output_tokens = int(usage.get("completion_tokens") or 0)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            self._answer.cached_tokens = int(details.get("cached_tokens") or 0)

    def _take_delta(self, delta: dict[str, Any]) -> Iterator[TextPiece | ReasoningPiece]:
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if reasoning or delta.get("content") or delta.get("tool_calls"):
            self._num_pieces += 1
            self._answer.first_token_seconds = self._answer.first_token_seconds or time.monotonic() - self._started
        if isinstance(reasoning, str):
            self._answer.reasoning += reasoning
            yield ReasoningPiece(reasoning)
        if isinstance(delta.get("content"), str) and delta["content"]:
            self._answer.content += delta["content"]
            yield TextPiece(delta["content"])
        for part in delta.get("tool_calls") or ():
            self._take_call(part)

    def _take_call(self, part: dict[str, Any]) -> None:
        index = int(part.get("index") or 0)
        call = self._calls.setdefault(index, ModelCall("", "", f"call_{secrets.token_hex(12)}"))
        function = part.get("function") or {}
        call.id = str(part.get("id") or call.id)
        name = str(function.get("name") or "")
        if name != call.name:  # llama-cpp-python repeats the whole name with each piece of the arguments
            call.name += name
        arguments = function.get("arguments")
        call.arguments += arguments if isinstance(arguments, str) else json.dumps(arguments) if arguments else ""

    def answer(self) -> ModelAnswer:
        if not self._answer.finish_reason:
            raise QuireError("request_failed", "The server's answer broke off before its end.", "Send it again.")
        self._answer.calls = [self._calls[index] for index in sorted(self._calls)]
        if self._answer.calls and self._answer.finish_reason == "length":
            self._answer.calls[-1].is_complete = False
        self._answer.seconds = time.monotonic() - self._started
        self._answer.output_tokens = self._answer.output_tokens or self._num_pieces  # of a server that counts none
        return self._answer


def _events(reply: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yields the JSON of each server-sent event."""
    while line := reply.readline(MAX_EVENT):
        if len(line) >= MAX_EVENT:
            raise QuireError("request_failed", f"The server sent an event of more than {MAX_EVENT} bytes.")
        text = line.strip()
        if not text.startswith(b"data:"):
            continue
        payload = text[5:].strip()
        if payload == b"[DONE]":
            return
        try:
            event = json.loads(payload)
        except (ValueError, RecursionError):
            raise QuireError("request_failed", f"The server sent no JSON: {payload[:100]!r}.") from None
        if isinstance(event, dict):
            yield event


def _refusal(status: int, data: bytes) -> QuireError:
    message = ""
    with suppress(ValueError, AttributeError):
        error = json.loads(data).get("error")
        message = str(error.get("message", "")) if isinstance(error, dict) else str(error or "")
    hint = "Give the key with --api-key." if status in (401, 403) else ""
    is_full = status in (400, 413, 422, 500) and "context" in message.lower()
    code = "context_full" if is_full else "request_failed"
    return QuireError(code, f"The server answered {status}: {message or data[:200].decode('utf-8', 'replace')}", hint)


def _context_len(listed: list[dict[str, Any]], name: str) -> int | None:
    """Reads the context as vLLM and Quire, or as llama.cpp, list it."""
    model = next((one for one in listed if one.get("id") == name), None)
    if model is None:
        return None
    meta = model.get("meta")
    for value in (model.get("max_model_len"), meta.get("n_ctx") if isinstance(meta, dict) else None):
        if isinstance(value, int) and value > 0:
            return value
    return None


def _with_strict(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "strict": True}}
