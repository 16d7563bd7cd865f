"""Ollama's API under `/api`, translated to the chat, completion and embedding jobs of the other dialects.

Replies are JSON lines unless `stream` is false. Sampling options that this engine does not have are refused by name.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.collector import SampleCollector
from quire.server.generation import GenerationRun
from quire.server.http.encoding import to_json
from quire.server.http.errors import bad_request
from quire.server.http.replies import stream_reply, whole_reply
from quire.server.http.route_parts import api_router, job_of
from quire.server.infill.prompt import ended_infill, infill_prompt
from quire.server.ollama.reply import OllamaReply, loaded_reply, times_of
from quire.server.ollama.schemas import (
    EmbedBody,
    GenerateBody,
    Generated,
    OllamaChatBody,
    OllamaFunction,
    OllamaMessage,
    OllamaTool,
    Options,
    ShowBody,
)
from quire.server.openai.embeddings import OwnPooling
from quire.server.openai.schemas import ChatBody
from quire.server.openai.translate import chat_params, conversation_of
from quire.server.state import Server
from quire.text.template import template_source
from quire.types import PromptTooLong, QuireError, SamplingParams, choose_pooling

LINES = "application/x-ndjson"
VERSION = "0.13.0"  # of the API, by which clients choose what to ask for
OPTION_NAMES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}  # Ollama's names of ours


def ollama_router(server: Server) -> APIRouter:
    router = api_router(server, "Ollama", "ollama")
    own = OwnPooling(server.files)

    @router.get("/api/version")
    async def version_of() -> dict[str, str]:
        return {"version": VERSION}

    @router.get("/api/tags")
    async def tags() -> dict[str, Any]:
        return {"models": [_model(server, name) for name in server.names if name != "*"]}

    @router.get("/api/ps")
    async def running() -> dict[str, Any]:
        more = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0, "context_length": server.edge.max_len}
        return {"models": [_model(server, name) | more for name in server.names if name != "*"]}

    @router.post("/api/show", response_model=None)
    async def show(body: ShowBody) -> Response:
        _check_model(server, body.model or body.name)
        return Response(to_json(_shown(server)), media_type="application/json")

    @router.post("/api/chat", response_model=None)
    async def chat(request: Request, body: OllamaChatBody) -> Response:
        model, body.model = body.model, _check_model(server, body.model)
        if not body.messages:
            return loaded_reply(model, {"message": {"role": "assistant", "content": ""}})
        run = await _converse(server, request, body, _messages(body.messages), body.tools)
        return await _reply(server, request, body, OllamaReply(run, model, is_chat=True))

    @router.post("/api/generate", response_model=None)
    async def generate(request: Request, body: GenerateBody) -> Response:
        model, body.model = body.model, _check_model(server, body.model)
        for name in ("images", "template", "context"):
            if getattr(body, name):
                raise bad_request("unsupported_parameter", f"{name} is not taken here.", name)
        if not body.prompt:
            return loaded_reply(model, {"response": ""})
        if body.suffix is not None or body.raw:
            run = await _continue(server, request, body)
        else:
            system = [{"role": "system", "content": body.system}] if body.system else []
            messages = [*system, {"role": "user", "content": body.prompt}]
            run = await _converse(server, request, body, messages, None)
        return await _reply(server, request, body, OllamaReply(run, model, is_chat=False))

    @router.post("/api/embed", response_model=None)
    async def embed(request: Request, body: EmbedBody) -> Response:
        model, body.model = body.model, _check_model(server, body.model)
        texts = [body.input] if isinstance(body.input, str) else body.input
        if not texts or texts == [""]:
            return Response(to_json({"model": model, "embeddings": []}), media_type="application/json")
        server.generation.check_samples(len(texts), 1)
        prompts = [await _encode(server, text, truncate=body.truncate is not False) for text in texts]
        rule = choose_pooling(await own.get(), server.config.model.pooling, None, None)
        params = SamplingParams(max_tokens=1, temperature=0.0, pooling=rule.kind)
        run = await server.generation.open(job_of(request, body, prompts, params))
        gather = SampleCollector(run.num_samples)

        async def whole() -> dict[str, Any]:
            vectors = [rule.scaled(one.embedding[: body.dimensions]) for one in gather.samples]
            return {
                "model": model,
                "embeddings": vectors,
                **times_of(run),
                "prompt_eval_count": run.totals.prompt_tokens,
            }

        return await whole_reply(request, run, gather.take, whole, server)

    return router


# ---------------------------------------------------------------------------------------------------------------------
# Requests


def _check_model(server: Server, name: str | None) -> str:
    """The served name of a model. Ollama's clients add a tag, `:latest`, to names without one."""
    if name is None:
        raise bad_request("missing_field", "The field 'model' is missing.", "model")
    if name not in server.names:
        return server.check_model(name.removesuffix(":latest"))
    return name


def _messages(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """The messages in OpenAI's form. Ollama's calls have no ids, so results belong to the calls before in order."""
    shown = []
    pending: list[str] = []  # ids of calls without a result yet
    for index, message in enumerate(messages):
        if message.images:
            where = f"messages[{index}].images"
            raise bad_request("unsupported_content", f"The model takes text only, and {where} holds images.", where)
        one: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            one["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [(call.id or f"call_{index}_{place}", call) for place, call in enumerate(message.tool_calls)]
            pending = [name for name, _ in calls]
            one["tool_calls"] = [_earlier_call(name, call.function) for name, call in calls]
        if message.role == "tool":
            name = message.tool_call_id or (pending.pop(0) if pending else f"call_{index}")
            one |= {"tool_call_id": name, "name": message.tool_name or "tool"}
        shown.append(one)
    return shown


def _earlier_call(name: str, function: OllamaFunction) -> dict[str, Any]:
    arguments = to_json(function.arguments or {}).decode()
    return {"id": name, "type": "function", "function": {"name": function.name, "arguments": arguments}}


def _sampling(body: Generated) -> dict[str, Any]:
    options = body.options or Options()
    given = options.model_dump(exclude_none=True, include={*Options.model_fields} - _UNUSED)
    fields = {OPTION_NAMES.get(name, name): value for name, value in given.items()}
    if fields.get("max_tokens", 0) < 0:
        del fields["max_tokens"]  # -1 and -2: without a limit
    return {**fields, "priority": body.priority, "timeout": body.timeout, "cache_salt": body.cache_salt}


_UNUSED = {
    "typical_p",
    "tfs_z",
    "mirostat",
    "repeat_last_n",
    "num_ctx",
    "num_keep",
    "num_batch",
    "num_gpu",
    "num_thread",
    "main_gpu",
    "low_vram",
    "use_mmap",
    "use_mlock",
    "numa",
}


async def _converse(
    server: Server, request: Request, body: Generated, messages: list[dict[str, Any]], tools: list[OllamaTool] | None
) -> GenerationRun:
    """Start a conversation, as the OpenAI dialect does."""
    fields: dict[str, Any] = {"messages": messages, **_sampling(body)}
    if tools:
        fields["tools"] = [
            {"type": "function", "function": tool.function.model_dump(exclude_none=True)} for tool in tools
        ]
    if isinstance(body.format, dict):
        fields["response_format"] = {"type": "json_object", "schema": body.format}
    elif body.format:
        fields["response_format"] = {"type": "json_object"}
    if isinstance(body.think, bool):
        fields["chat_template_kwargs"] = {"enable_thinking": body.think, "thinking": body.think}
    elif body.think is not None:
        fields["reasoning_effort"] = body.think
    same = ChatBody.model_validate(fields)
    prompt = await server.chat.make(conversation_of(same))
    job = job_of(request, body, [prompt.tokens], prompt.fit(chat_params(same)))
    job.make_parser, job.grammar_param = prompt.make_parser, "format"
    return await server.generation.open(job)


async def _continue(server: Server, request: Request, body: GenerateBody) -> GenerationRun:
    """Continue raw text, or fill the gap before a suffix."""
    if body.format:
        raise bad_request("unsupported_parameter", "format is not taken with raw or suffix.", "format")
    tokenizer, text = server.generation.tokenizer, body.prompt or ""
    params = chat_params(ChatBody.model_validate({"messages": [{"role": "user", "content": ""}], **_sampling(body)}))
    if body.suffix is None:
        prompt = await server.chat.encode(text)
    else:
        prompt = await infill_prompt(server.chat, tokenizer, text, body.suffix)
        params = ended_infill(params, tokenizer)
    return await server.generation.open(job_of(request, body, [prompt], params))


async def _encode(server: Server, text: str, *, truncate: bool) -> list[int]:
    try:
        return await server.chat.encode(text)
    except PromptTooLong:
        if not truncate:
            raise
        return (await server.chat.tokenize(text, add_special=True))[: server.chat.max_prompt]


async def _reply(server: Server, request: Request, body: Generated, reply: OllamaReply) -> Response:
    if body.stream is False:
        return await whole_reply(request, reply.run, reply.take, reply.body, server)
    response = await stream_reply(request, reply.run, reply, server)
    response.headers["content-type"] = LINES
    return response


def _model(server: Server, name: str) -> dict[str, Any]:
    path = server.files.path
    files = [path] if path.is_file() else [file for file in path.glob("*") if file.is_file()]
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(server.created, UTC).isoformat().replace("+00:00", "Z"),
        "size": sum(file.stat().st_size for file in files),
        "digest": hashlib.sha256(str(path).encode()).hexdigest(),
        "details": _details(server),
    }


def _details(server: Server) -> dict[str, Any]:
    ready = server.fleet.lead.client.ready
    return {
        "parent_model": "",
        "format": "gguf" if server.files.kind == "gguf" else "safetensors",
        "family": ready.model,
        "families": [ready.model],
        "parameter_size": "",
        "quantization_level": ready.dtype,
    }


def _shown(server: Server) -> dict[str, Any]:
    formats, ready = server.chat.formats, server.fleet.lead.client.ready
    abilities = ["completion", "embedding"]
    if formats is not None and formats.tools is not None:
        abilities.append("tools")
    if formats is not None and formats.reasoning is not None:
        abilities.append("thinking")
    try:
        template = template_source(server.edge.tokenizer, server.config.model.chat_template)
    except QuireError:
        template = ""
    return {
        "modelfile": f"FROM {server.name}\n",
        "parameters": "\n".join(f"{name} {value}" for name, value in sorted(ready.defaults.items())),
        "template": template,
        "details": _details(server),
        "model_info": {"general.architecture": ready.model, f"{ready.model}.context_length": server.edge.max_len},
        "capabilities": abilities,
        "modified_at": datetime.fromtimestamp(server.created, UTC).isoformat().replace("+00:00", "Z"),
    }
