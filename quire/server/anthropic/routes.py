"""Anthropic's routes: create a message, whole or streamed, and count a message's tokens."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.anthropic.messages import MessageState, MessageStream
from quire.server.anthropic.schemas import CountBody, MessagesBody
from quire.server.anthropic.translate import conversation_of, params_of
from quire.server.generation import GenerationJob
from quire.server.http.replies import stream_reply, whole_reply
from quire.server.http.route_parts import api_router, job_of
from quire.server.state import Server


def anthropic_router(server: Server) -> APIRouter:
    router = api_router(server, "Anthropic", "anthropic")

    @router.post("/v1/messages", response_model=None)
    async def messages(request: Request, body: MessagesBody) -> Response:
        """Header lines at the top of the system prompt that begin with `x-anthropic-billing-header:` are dropped: agent
        clients change them on every call, and the prefix cache would find nothing. Nothing else is touched."""
        model = server.check_model(body.model)
        prompt = await server.chat.make(conversation_of(body))
        job: GenerationJob = job_of(request, body, [prompt.tokens], prompt.fit(params_of(body)))
        job.make_parser, job.grammar_param = prompt.make_parser, prompt.grammar_param
        run = await server.generation.open(job)
        if body.stream:
            stream = MessageStream(run, model)
            return await stream_reply(request, run, stream, server)
        state = MessageState(run, model)
        return await whole_reply(request, run, state.take, state.body, server)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountBody) -> dict[str, Any]:
        server.check_model(body.model)
        prompt = await server.chat.make(conversation_of(body), shown=True)
        return {"input_tokens": len(prompt.tokens)}

    return router
