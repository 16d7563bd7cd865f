"""`/tokenize`, `/detokenize` and `/render`: what a text or a conversation becomes before the model sees it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from quire.server.chat import COUNTED_TOKENS
from quire.server.encoding import to_json
from quire.server.errors import bad_request
from quire.server.openai.schemas import ChatBody
from quire.server.openai.translate import conversation_of
from quire.server.route_parts import api_router
from quire.server.schemas import Body, Name, TokenList
from quire.server.state import Server


class TokenizeBody(Body):
    model: Name | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    model: Name | None = None
    tokens: Annotated[TokenList, Field(max_length=COUNTED_TOKENS)]
    skip_special_tokens: bool = False


def text_router(server: Server) -> APIRouter:
    router = api_router(server, "Text", "openai")

    @router.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeBody) -> Response:
        server.check_model(body.model)
        tokenizer = server.generation.tokenizer
        ids = await server.chat.tokenize(body.prompt, add_special=body.add_special_tokens)
        reply: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": server.edge.max_len}
        if body.return_token_strs:
            reply["token_strs"] = [tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids]
        return _json(reply)

    @router.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeBody) -> Response:
        server.check_model(body.model)
        highest = max(body.tokens, default=0)
        if highest >= server.edge.vocab_size:
            message = f"{highest} is no token id of this model (0 to {server.edge.vocab_size - 1})."
            raise bad_request("invalid_value", message, "tokens")
        text = await server.chat.detokenize(body.tokens, skip_special=body.skip_special_tokens)
        return _json({"prompt": text})

    @router.post("/render", response_model=None)
    async def render(body: ChatBody) -> Response:
        """The exact prompt this chat becomes; the sampling fields play no part."""
        server.check_model(body.model)
        prompt = await server.chat.make(conversation_of(body), shown=True)
        return _json({"prompt": prompt.text, "tokens": prompt.tokens, "count": len(prompt.tokens)})

    return router


def _json(value: dict[str, Any]) -> Response:
    """FastAPI would look at every token of a reply by itself."""
    return Response(to_json(value), media_type="application/json")
