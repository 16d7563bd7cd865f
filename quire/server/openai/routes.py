"""OpenAI's routes for models, chat and completions: validate, open a run, reply whole or as a stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.generation import GenerationRun
from quire.server.http.errors import ApiError, counting_output
from quire.server.http.replies import stream_reply, whole_reply
from quire.server.http.route_parts import api_router, check_verbosity, job_of
from quire.server.infill.prompt import ended_infill, infill_prompt
from quire.server.openai import completions
from quire.server.openai.chat import ChatStream, ChatWhole
from quire.server.openai.completions import CompletionStream, CompletionWhole
from quire.server.openai.habits import structure_of
from quire.server.openai.schemas import ChatBody, CompletionBody, OpenAISampling
from quire.server.openai.translate import chat_params, conversation_of, output_grammar, output_param, params_of
from quire.server.schemas import length_of
from quire.server.state import Server
from quire.server.truncation import make_prompt


def openai_router(server: Server) -> APIRouter:
    router = api_router(server, "OpenAI", "openai")

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        names = [*(name for name in server.names if name != "*"), *server.edge.adapters]
        return {"object": "list", "data": [model_body(server, name) for name in names]}

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        return model_body(server, server.check_model(name))

    @router.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        model = server.check_model(body.model)
        check_stream(body)
        check_verbosity(server, body.verbosity, "verbosity")
        length = body.max_completion_tokens or body.max_tokens
        with counting_output(length):
            prompt, dropped = await make_prompt(
                server.chat, conversation_of(body), truncate=body.truncation == "auto", max_tokens=length_of(length)
            )
        job = job_of(request, body, [prompt.tokens], prompt.fit(chat_params(body)))
        job.make_parser, job.grammar_param = prompt.make_parser, prompt.grammar_param
        run = await server.generation.open(job)
        run.totals.dropped_messages = dropped
        tokenizer = server.generation.tokenizer
        if not body.stream:
            whole = ChatWhole(run, model, tokenizer, body)
            return await whole_reply(request, run, whole.take, whole.body, server)
        stream = ChatStream(run, model, tokenizer, body)
        return await stream_reply(request, run, stream, server)

    @router.post("/v1/completions", response_model=None)
    async def raw_completions(request: Request, body: CompletionBody) -> Response:
        model = server.check_model(body.model)
        check_stream(body)
        completions.check(body)
        given = completions.prompts_of(body)
        server.generation.check_samples(len(given), body.n or 1)
        with counting_output(body.max_tokens):
            if body.suffix is None:
                prompts = [await server.chat.encode(prompt) for prompt in given]
            else:
                prompts = [await infill_prompt(server.chat, server.generation.tokenizer, str(body.prompt), body.suffix)]
        max_tokens = body.max_tokens or None if body.max_tokens != 0 else 1
        prompt_logprobs = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
        params = params_of(body, max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs)
        if body.suffix is not None:
            params = ended_infill(params, server.generation.tokenizer)
        structured, name = structure_of(body)
        wanted = output_grammar(body.response_format, structured, name)
        grammar = await server.chat.check_output(wanted, output_param(structured, name))
        job = job_of(request, body, prompts, replace(params, grammar=grammar))
        job.grammar_param = output_param(structured, name)
        job.num_shown = params.n if body.echo and body.logprobs is not None else 1
        run: GenerationRun = await server.generation.open(job)
        tokenizer = server.generation.tokenizer
        if not body.stream:
            whole = CompletionWhole(run, model, tokenizer, body)
            return await whole_reply(request, run, whole.take, whole.body, server)
        stream = CompletionStream(run, model, tokenizer, body)
        return await stream_reply(request, run, stream, server)

    return router


def check_stream(body: OpenAISampling) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "invalid_value", "stream_options needs stream to be true.", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "unsupported_parameter", "prompt_logprobs can't be streamed.", "prompt_logprobs")


def model_body(server: Server, name: str) -> dict[str, Any]:
    adapters = server.edge.adapters
    more: dict[str, Any] = {}
    if name in adapters:
        more = {"parent": server.name, "root": str(adapters[name].path), "digest": adapters[name].digest}
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "quire",
        "max_model_len": server.edge.max_len,
        **more,
    }
