"""Routes of sessions: the cache of a conversation, saved under a name, loaded after a restart, shown and deleted.

A key sees its own sessions only: names are looked up together with their owner.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from quire.server.http.errors import ApiError, bad_request
from quire.server.http.route_parts import api_router, cache_salt
from quire.server.openai.schemas import ChatBody, ChatMessage, ChatTool, JsonObject
from quire.server.openai.translate import conversation_of
from quire.server.schemas import Items, Name, Service, TokenPrompt
from quire.server.state import Server
from quire.types.sessions import (
    DEFAULT_SECONDS,
    MAX_MESSAGES,
    MAX_SECONDS,
    SessionAction,
    SessionInfo,
    check_session_id,
)


class SaveBody(Service):
    """The conversation, as it was sent for its last answer, with that answer: messages, a text or token ids."""

    model: Name | None = None
    messages: Annotated[Items[ChatMessage], Field(min_length=1)] | None = None
    tools: Items[ChatTool] | None = None
    chat_template_kwargs: JsonObject | None = None
    prompt: str | TokenPrompt | None = None
    expires_in: Annotated[float, Field(gt=0, le=MAX_SECONDS)] = DEFAULT_SECONDS

    def check(self) -> None:
        if (self.messages is None) == (self.prompt is None):
            raise bad_request("missing_field", "Send either messages or prompt.", "messages")


def sessions_router(server: Server) -> APIRouter:
    router = api_router(server, "Sessions", "openai")

    async def run(action: SessionAction, request: Request, session_id: str, **fields: Any) -> SessionInfo | None:
        check_session_id(session_id)
        supervisor = server.fleet.lead.supervisor
        return await supervisor.session(action, session_id, str(request.state.owner), **fields)

    async def tokens_of(body: SaveBody) -> list[int]:
        if body.messages is not None:
            chat = ChatBody(
                messages=body.messages,
                tools=body.tools,
                chat_template_kwargs=body.chat_template_kwargs,
                add_generation_prompt=False,
            )
            return (await server.chat.make(conversation_of(chat), shown=True)).tokens
        if isinstance(body.prompt, str):
            return await server.chat.tokenize(body.prompt, add_special=True)
        tokens = list(body.prompt or ())
        if max(tokens, default=0) >= server.edge.vocab_size:
            raise bad_request("invalid_value", f"{max(tokens)} is no token id of this model.", "prompt")
        return tokens

    @router.post("/v1/sessions/{session_id}/save")
    async def save(request: Request, session_id: str, body: SaveBody) -> dict[str, Any]:
        """Keep what the cache holds of a conversation, until `expires_in` seconds have passed."""
        check_session_id(session_id)
        server.check_model(body.model)
        body.check()
        tokens = await tokens_of(body)
        server.edge.check_prompt(tokens)
        messages = ""
        if body.messages is not None:
            messages = json.dumps([one.model_dump(mode="json", exclude_unset=True) for one in body.messages])
            if len(messages) > MAX_MESSAGES:
                raise ApiError(413, "body_too_large", "The messages are too long to be kept.", "messages")
        salt = cache_salt(request, body.salt())
        fields = {"tokens": tokens, "salt": salt, "seconds": body.expires_in, "messages": messages}
        return _body(await run("save", request, session_id, **fields))

    @router.post("/v1/sessions/{session_id}/load")
    async def load(request: Request, session_id: str) -> dict[str, Any]:
        """Load a session's cache, so that the next turn of its conversation computes its new tokens alone."""
        return _body(await run("load", request, session_id))

    @router.get("/v1/sessions/{session_id}")
    async def get(request: Request, session_id: str) -> dict[str, Any]:
        return _body(await run("get", request, session_id))

    @router.delete("/v1/sessions/{session_id}")
    async def delete(request: Request, session_id: str) -> dict[str, Any]:
        await run("delete", request, session_id)
        return {"id": session_id, "object": "session", "deleted": True}

    return router


def _body(info: SessionInfo | None) -> dict[str, Any]:
    assert info is not None, "only a deletion returns none"
    fields = asdict(info)
    messages = fields.pop("messages")
    return {"object": "session", **fields, "messages": json.loads(messages) if messages else None}
