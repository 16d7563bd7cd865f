"""Reads request bodies: within bounds, decoded strictly, and large ones validated by a worker process first.

`body_route` makes the route class of every router that takes a body. A body larger than `INLINE_BODY` bytes is decoded
and validated in a text worker, which returns it with packed token ids. A thread builds its fields from that form, so
that no body blocks the event loop or costs this process more than a small multiple of its size.
"""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from collections.abc import Awaitable, Callable
from operator import countOf
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope, Send

from quire.server.http.errors import ApiError, from_validation
from quire.server.http.lenient import without_unknown

INLINE_BODY = 64 << 10
MAX_DEPTH = 200  # nesting of objects and lists
MAX_HELD = 256 << 20  # bytes of all bodies held at the same time

_PROMPTS = frozenset({"prompt", "input", "tokens"})  # fields that hold many token ids
_IDS = 1  # the code of packed token ids in msgpack
_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

CheckLarge = Callable[[str, bytes], Awaitable[bytes]]


class HeldBodies:
    """Counts the bytes of bodies that this process holds, over all connections."""

    def __init__(self, limit: int = MAX_HELD):
        self._limit = limit
        self.num_bytes = 0

    def take(self, count: int) -> None:
        if self.num_bytes + count > self._limit:
            message = f"The server holds {self.num_bytes} bytes of requests. Try again a little later."
            raise ApiError(503, "overloaded", message, headers={"retry-after": "1", "connection": "close"})
        self.num_bytes += count

    def give_back(self, count: int) -> None:
        self.num_bytes -= count


def decode_json(body: bytes) -> Any:
    """Decode strict JSON: no NaN or infinities, no half surrogate pairs, no numbers beyond a float, and nesting that
    can be encoded again."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        if _SURROGATE.search(_PAIR.sub(b"", body)):
            message = "The body holds half a surrogate pair, which is no text. Send valid Unicode."
            raise ApiError(400, "invalid_text", message) from None
        raise json.JSONDecodeError(str(error).removeprefix("JSON is malformed: "), "", 0) from None
    except RecursionError:
        raise json.JSONDecodeError("it is nested too deeply", "", 0) from None
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list)))
        level = [one for values in inner for one in values if isinstance(one, (dict, list))]
        if not level:
            return
    raise json.JSONDecodeError(f"it is nested more than {MAX_DEPTH} deep", "", 0)


def validate_body(path: str, value: Any) -> None:
    """Raise the validation error of a decoded body against its route's model. Paths without a model pass."""
    model = _model_of(path)
    if model is None:
        return
    try:
        model.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise from_validation([{**one, "loc": ("body", *one["loc"])} for one in found]) from None


def known_fields(path: str, value: Any) -> tuple[Any, list[str]]:
    """A decoded body without the fields that its route does not know, and their names."""
    model = body_models().get(path)
    return (value, []) if model is None else without_unknown(model, value)


def body_models() -> dict[str, type[BaseModel]]:
    """The body model of every route that takes a body."""
    from quire.server.anthropic.schemas import CountBody, MessagesBody
    from quire.server.batches.batch_routes import BatchBody
    from quire.server.infill.routes import InfillBody
    from quire.server.ollama.schemas import EmbedBody, GenerateBody, OllamaChatBody, ShowBody
    from quire.server.openai.embeddings import EmbeddingsBody
    from quire.server.openai.response_schemas import ResponsesBody
    from quire.server.openai.schemas import ChatBody, CompletionBody
    from quire.server.session_routes import SaveBody
    from quire.server.text_routes import DetokenizeBody, TokenizeBody

    return {
        "/v1/chat/completions": ChatBody,
        "/v1/completions": CompletionBody,
        "/v1/responses": ResponsesBody,
        "/v1/embeddings": EmbeddingsBody,
        "/v1/messages": MessagesBody,
        "/v1/messages/count_tokens": CountBody,
        "/tokenize": TokenizeBody,
        "/detokenize": DetokenizeBody,
        "/render": ChatBody,
        "/v1/chat/render": ChatBody,
        "/infill": InfillBody,
        "/v1/batches": BatchBody,
        "/v1/sessions/{session_id}/save": SaveBody,
        "/api/chat": OllamaChatBody,
        "/api/generate": GenerateBody,
        "/api/embed": EmbedBody,
        "/api/show": ShowBody,
    }


def _model_of(path: str) -> type[BaseModel] | None:
    """The body model of a request's path, whose parameters may have any value."""
    models = body_models()
    return models.get(path) or models.get(re.sub(r"(?<=^/v1/sessions/)[^/]+", "{session_id}", path))


def body_route(held: HeldBodies, check_large: CheckLarge, *, lenient: bool = False) -> type[APIRoute]:
    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
            handle = super().get_route_handler()

            async def handle_bounded(request: Request) -> Response:
                return await handle(_BoundedRequest(request, held, check_large, lenient))

            return handle_bounded

        async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await super().handle(scope, receive, send)
            finally:  # runs after the last event of the reply
                held.give_back(scope.get("state", {}).pop("held_bytes", 0))

    return BodyRoute


class _BoundedRequest(Request):
    def __init__(self, request: Request, held: HeldBodies, check_large: CheckLarge, lenient: bool):
        super().__init__(request.scope, request.receive)
        self._held, self._check_large, self._lenient = held, check_large, lenient

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            chunks: list[bytes] = []
            async for chunk in self.stream():
                self._held.take(len(chunk))
                self.state.held_bytes = getattr(self.state, "held_bytes", 0) + len(chunk)
                chunks.append(chunk)
            body = b"".join(chunks)
            self._body = body
        return self._body

    async def json(self) -> Any:
        """The body's value. A large body's fields are already validated."""
        body, path = await self.body(), self.url.path
        if len(body) <= INLINE_BODY:
            value = decode_json(body)
            if self._lenient:
                value, self.state.ignored = known_fields(path, value)
            return value
        packed = await self._check_large(path, body)
        self._body = b""
        return await asyncio.to_thread(_read_packed, path, packed)


def pack_body(value: Any) -> bytes:
    """A validated body as msgpack with its prompts of token ids as arrays, for `_read_packed`."""
    if isinstance(value, dict):
        value = {name: _packed_ids(inner) if name in _PROMPTS else inner for name, inner in value.items()}
    return msgspec.msgpack.encode(value)


def _packed_ids(value: Any) -> Any:
    if not isinstance(value, list) or not value:
        return value
    if isinstance(value[0], list):
        return [_packed_ids(inner) for inner in value]
    if countOf(map(type, value), int) == len(value):
        return msgspec.msgpack.Ext(_IDS, array("i", value).tobytes())
    return value


def _read_packed(path: str, packed: bytes) -> Any:
    value = msgspec.msgpack.decode(packed, ext_hook=_unpack_ids)
    model = _model_of(path)
    return value if model is None else model.model_validate(value)


def _unpack_ids(code: int, data: memoryview) -> array[int]:
    ids = array("i")
    ids.frombytes(data)
    return ids
