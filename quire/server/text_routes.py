"""`/tokenize`, `/detokenize` and `/render`: what a text or a conversation becomes before the model sees it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

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
    tokens: TokenList
    skip_special_tokens: bool = False


def text_router(server: Server) -> APIRouter:
    router = api_router(server, "Text", "openai")

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        server.check_model(body.model)
        tokenizer = server.generation.tokenizer
        ids = await server.chat.tokenize(body.prompt, add_special=body.add_special_tokens)
        reply: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": server.edge.max_len}
        if body.return_token_strs:
            reply["token_strs"] = [tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids]
        return reply

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        server.check_model(body.model)
        for token in body.tokens:
            if token >= server.edge.vocab_size:
                message = f"{token} is no token id of this model (0 to {server.edge.vocab_size - 1})."
                raise bad_request("invalid_value", message, "tokens")
        text = await server.chat.detokenize(body.tokens, skip_special=body.skip_special_tokens)
        return {"prompt": text}

    @router.post("/render")
    async def render(body: ChatBody) -> dict[str, Any]:
        """The exact prompt this chat becomes; the sampling fields play no part."""
        server.check_model(body.model)
        prompt = await server.chat.make(conversation_of(body), shown=True)
        return {"prompt": prompt.text, "tokens": prompt.tokens, "count": len(prompt.tokens)}

    return router
