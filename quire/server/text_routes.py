"""Routes that show the model's input: `/tokenize`, `/detokenize`, `/tokenizer_info` and `/render`."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from quire.server.chat import COUNTED_TOKENS
from quire.server.http.encoding import to_json
from quire.server.http.errors import bad_request
from quire.server.http.route_parts import api_router
from quire.server.openai.schemas import ChatBody, ChatMessage, ChatTool, JsonObject
from quire.server.openai.translate import conversation_of
from quire.server.schemas import Body, Items, Name, TokenList
from quire.server.state import Server
from quire.text.template import template_source
from quire.text.tokenizer import Tokenizer

SLICE = 8192  # tokens encoded between two yields to the event loop


class TokenizeBody(Body):
    """A text, as vLLM (`prompt`) or llama.cpp (`content`) calls it, or a conversation."""

    model: Name | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[Items[ChatMessage], Field(min_length=1)] | None = None
    tools: Items[ChatTool] | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None  # None: true for a prompt, false for a conversation
    add_special: bool = False  # llama.cpp's flag, applies to content
    parse_special: Literal[True] = True
    return_token_strs: bool = False
    with_pieces: bool = False

    @property
    def adds_special(self) -> bool:
        if self.prompt is None:
            return self.add_special or bool(self.add_special_tokens)
        return self.add_special_tokens is not False

    def check(self) -> None:
        given = [name for name in ("prompt", "content", "messages") if getattr(self, name) is not None]
        if not given:
            message = "There is nothing to tokenize: send prompt, content or messages."
            raise bad_request("missing_field", message, "prompt")
        if len(given) > 1:
            raise bad_request("invalid_value", f"{given[0]} and {given[1]} can't both be tokenized.", given[1])
        if self.messages is None:
            for name in ("tools", "chat_template_kwargs", "continue_final_message"):
                if getattr(self, name) not in (None, False):
                    raise bad_request("invalid_value", f"{name} needs messages.", name)
        elif self.adds_special:
            message = "The chat template writes a conversation's special tokens; leave add_special_tokens out."
            raise bad_request("unsupported_parameter", message, "add_special_tokens")

    def chat(self) -> ChatBody:
        shared = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
        return ChatBody(**{name: getattr(self, name) for name in shared})


class DetokenizeBody(Body):
    model: Name | None = None
    tokens: Annotated[TokenList, Field(max_length=COUNTED_TOKENS)]
    skip_special_tokens: bool = False


def text_router(server: Server) -> APIRouter:
    router = api_router(server, "Text", "openai")

    @router.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeBody) -> Response:
        """The token ids of a text or of a conversation, in vLLM's and llama.cpp's form."""
        server.check_model(body.model)
        body.check()
        if body.messages is not None:
            ids = (await server.chat.make(conversation_of(body.chat()), shown=True)).tokens
        else:
            ids = await server.chat.tokenize(body.prompt or body.content or "", add_special=body.adds_special)
        reply: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": server.edge.max_len}
        if body.return_token_strs or body.with_pieces:
            pieces = await _pieces(server.generation.tokenizer, ids)
            if body.return_token_strs:
                reply["token_strs"] = [piece.decode("utf-8", "replace") for piece in pieces]
            if body.with_pieces:
                shown = zip(ids, map(_text_or_bytes, pieces), strict=True)
                reply["tokens"] = [{"id": token_id, "piece": piece} for token_id, piece in shown]
        return _json(reply)

    @router.get("/tokenizer_info", response_model=None)
    async def tokenizer_info() -> Response:
        """What a client needs to count tokens by itself; evaluation harnesses ask for it before anything else."""
        tokenizer, template = server.generation.tokenizer, server.config.model.chat_template
        special = tokenizer.special_tokens
        named = {name: special.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        return _json(
            {
                **named,
                "bos_token_id": tokenizer.bos_id,
                "eos_token_ids": list(tokenizer.eos_ids),
                "vocab_size": server.edge.vocab_size,
                "model_max_length": server.edge.max_len,
                "chat_template": template_source(tokenizer, template) or None,
                "tool_format": server.chat.tool_format,
                "formats": server.chat.format_notes,
            }
        )

    @router.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeBody) -> Response:
        server.check_model(body.model)
        highest = max(body.tokens, default=0)
        if highest >= server.edge.vocab_size:
            message = f"{highest} is no token id of this model (0 to {server.edge.vocab_size - 1})."
            raise bad_request("invalid_value", message, "tokens")
        text = await server.chat.detokenize(body.tokens, skip_special=body.skip_special_tokens)
        return _json({"prompt": text, "content": text})  # vLLM's name and llama.cpp's

    @router.post("/v1/chat/render", response_model=None)
    @router.post("/render", response_model=None)
    async def render(body: ChatBody) -> Response:
        """Return the prompt that this chat is rendered to. Sampling fields are ignored."""
        server.check_model(body.model)
        prompt = await server.chat.make(conversation_of(body), shown=True)
        return _json({"prompt": prompt.text, "tokens": prompt.tokens, "count": len(prompt.tokens)})

    return router


def _json(value: dict[str, Any]) -> Response:
    """A JSON response that bypasses FastAPI's encoder, which visits every token."""
    return Response(to_json(value), media_type="application/json")


async def _pieces(tokenizer: Tokenizer, ids: list[int]) -> list[bytes]:
    """Each token's bytes, in slices between which the event loop runs."""
    pieces: list[bytes] = []
    for start in range(0, len(ids), SLICE):
        pieces += map(tokenizer.token_bytes, ids[start : start + SLICE])
        await asyncio.sleep(0)
    return pieces


def _text_or_bytes(piece: bytes) -> str | list[int]:
    """A token's text, or a list of its bytes if it is no valid text alone, as in llama.cpp."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)
