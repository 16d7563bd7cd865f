"""Routes of `/v1/responses`: create (whole or streamed), get, delete, input items. A key sees only its own
responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from quire.server.http.errors import ApiError, counting_output
from quire.server.http.replies import stream_reply, whole_reply
from quire.server.http.route_parts import api_router, check_verbosity, job_of
from quire.server.openai.response_schemas import ResponsesBody
from quire.server.openai.response_translate import (
    check_include,
    conversation_of,
    items_of,
    messages_of,
    params_of,
    stored_items,
)
from quire.server.openai.responses import ResponseState, ResponseStream, ResponseWhole
from quire.server.state import Server
from quire.server.store import StoredResponse
from quire.server.truncation import make_prompt


def responses_router(server: Server) -> APIRouter:
    router = api_router(server, "OpenAI", "openai")

    async def find(request: Request, response_id: str, param: str) -> StoredResponse:
        found = await server.store.get(response_id, owner_of(request))
        if found is None:
            raise ApiError(404, "not_found", f"There is no stored response {response_id[:100]!r}.", param)
        return found

    @router.post("/v1/responses", response_model=None)
    async def create_response(request: Request, body: ResponsesBody) -> Response:
        model = server.check_model(body.model)
        items = items_of(body)
        messages = messages_of(items)
        if body.previous_response_id is not None:
            earlier = await find(request, body.previous_response_id, "previous_response_id")
            messages = [*earlier.messages, *messages]
        check_include(body.include)
        check_verbosity(server, body.text.verbosity if body.text is not None else None, "text.verbosity")
        with counting_output(body.max_output_tokens):
            prompt, dropped = await make_prompt(
                server.chat,
                conversation_of(body, messages),
                truncate=body.truncation == "auto",
                max_tokens=body.max_output_tokens,
            )
        job = job_of(request, body, [prompt.tokens], prompt.fit(params_of(body)))
        job.make_parser, job.grammar_param = prompt.make_parser, prompt.grammar_param
        run = await server.generation.open(job)
        run.totals.dropped_messages = dropped
        state = ResponseState(run, model, body, server.generation.tokenizer)

        async def store(state: ResponseState) -> None:
            if body.store is not False:
                conversation = [*messages, state.answer()]
                await server.store.put(
                    StoredResponse(state.id, owner_of(request), state.body(), stored_items(items), conversation)
                )

        if body.stream:
            stream = ResponseStream(state, store)
            return await stream_reply(request, run, stream, server)
        whole = ResponseWhole(state, store)
        return await whole_reply(request, run, whole.take, whole.body, server)

    @router.get("/v1/responses/{response_id}")
    async def get_response(request: Request, response_id: str, stream: bool = False) -> dict[str, Any]:
        if stream:
            raise ApiError(400, "unsupported_parameter", "A stored response can't be streamed again.", "stream")
        return (await find(request, response_id, "response_id")).body

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> dict[str, Any]:
        await find(request, response_id, "response_id")
        await server.store.delete(response_id, owner_of(request))
        return {"id": response_id, "object": "response", "deleted": True}

    @router.get("/v1/responses/{response_id}/input_items")
    async def input_items(
        request: Request,
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        items = (await find(request, response_id, "response_id")).items
        return _list_body(items if order == "asc" else items[::-1], limit, after)

    return router


def _list_body(items: list[dict[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    """A list of at most `limit` items, starting after the item `after` if given."""
    places = [place for place, item in enumerate(items) if item["id"] == after]
    if after is not None and not places:
        raise ApiError(400, "invalid_value", f"There is no item {after[:100]!r} in this response.", "after")
    items = items[places[0] + 1 :] if places else items
    shown = items[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > limit,
    }


def owner_of(request: Request) -> str:
    return str(request.state.owner)  # set by the gate
