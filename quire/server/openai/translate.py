"""Translates OpenAI's bodies: sampling parameters, messages to the form of chat templates, output formats."""

from __future__ import annotations

import json
from typing import Any

from quire.server.http.errors import bad_request, in_client_words
from quire.server.openai.habits import structure_of, with_tools
from quire.server.openai.schemas import (
    ChatBody,
    ChatMessage,
    ChatTool,
    ContentPart,
    NamedTool,
    OpenAISampling,
    Prediction,
    ResponseFormat,
    StructuredOutputs,
)
from quire.server.schemas import length_of, sampling_params, schema_text, stops_of
from quire.text.conversation import Conversation
from quire.types import GrammarSpec, QuireError, SamplingParams

DEFAULT_VERBOSITY = "medium"


def params_of(
    body: OpenAISampling, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
) -> SamplingParams:
    return sampling_params(
        body,
        stop=stops_of(body.stop),
        n=body.n,
        max_tokens=length_of(max_tokens),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        prediction=None if body.prediction is None else _predicted_text(body.prediction),
    )


def _predicted_text(prediction: Prediction) -> str | None:
    """The text of a prediction; None for an empty one, which predicts nothing."""
    content = prediction.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    return text or None


def chat_params(body: ChatBody) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("invalid_value", "top_logprobs needs logprobs to be true.", "top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    by_new_name = body.max_completion_tokens is not None
    max_tokens = length_of(body.max_completion_tokens if by_new_name else body.max_tokens)
    try:
        return params_of(body, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs)
    except QuireError as error:
        raise in_client_words(error, {"max_tokens": "max_completion_tokens"} if by_new_name else {}) from None


def conversation_of(body: ChatBody) -> Conversation:
    body = with_tools(body)
    structured, name = structure_of(body)
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            kwargs.setdefault("enable_thinking", False)
    if body.verbosity not in (None, DEFAULT_VERBOSITY):
        kwargs.setdefault("verbosity", body.verbosity)
    choice = body.tool_choice
    return Conversation(
        messages=[message_of(message, index) for index, message in enumerate(body.messages)],
        tools=[_without_cache(tool) for tool in body.tools or ()],
        schema_places=[f"tools[{index}].function.parameters" for index in range(len(body.tools or ()))],
        tool_choice=choice.function.name if isinstance(choice, NamedTool) else choice or "auto",
        parallel_tools=body.parallel_tool_calls is not False,
        template_kwargs=kwargs,
        continue_final=body.continue_final_message,
        add_generation_prompt=body.add_generation_prompt,
        output=output_grammar(body.response_format, structured, name),
        output_param=output_param(structured, name),
        thinking_budget=body.thinking_budget,
    )


def _without_cache(tool: ChatTool) -> dict[str, Any]:
    return tool.model_dump(exclude_none=True, exclude={"cache_control": True, "function": {"cache_control"}})


def message_of(message: ChatMessage, index: int) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    shown: dict[str, Any] = {"role": role, "content": _content_of(message.content, index)}
    if message.tool_calls:
        calls = [call.model_dump(exclude_none=True) for call in message.tool_calls]
        shown |= {"tool_calls": calls, "content": shown["content"] or ""}
    elif shown["content"] is None:
        shown["content"] = message.refusal
    if shown["content"] is None:
        where = f"messages[{index}].content"
        raise bad_request("missing_field", f"The message at {where} has no content.", where)
    reasoning = message.reasoning_content or message.reasoning
    optional = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": reasoning}
    return shown | {key: value for key, value in optional.items() if value is not None}


def _content_of(content: str | list[ContentPart] | None, index: int) -> str | list[dict[str, str]] | None:
    if not isinstance(content, list):
        return content
    parts = []
    for place, part in enumerate(content):
        text = part.text if part.type == "text" else part.refusal if part.type == "refusal" else None
        if text is None:
            where = f"messages[{index}].content[{place}]"
            if part.type in ("text", "refusal"):
                raise bad_request("missing_field", f"The part at {where} has no text.", where)
            message = f"The model takes text only, and {where} is of type {part.type!r}."
            raise bad_request("unsupported_content", message, where)
        parts.append({"type": "text", "text": text})
    return parts


def output_grammar(
    form: ResponseFormat | None, structured: StructuredOutputs | None, name: str = "structured_outputs"
) -> GrammarSpec | None:
    """The grammar of `response_format`, or of `structured`, whose field the client calls `name`."""
    grammar = None
    if form is not None and form.schema_ is not None and form.json_schema is None and form.type != "text":
        text = schema_text(form.schema_, "response_format.schema")
        grammar = GrammarSpec("json_schema", text, strict=False)
    elif form is not None and form.type == "structural_tag":
        shape = form.model_dump(include={"structures", "triggers", "format"}, exclude_none=True)
        grammar = GrammarSpec("structural_tag", schema_text(shape, "response_format"))
    elif form is not None and form.type == "json_object":
        grammar = GrammarSpec("json_object")
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None:
            message = "response_format of type json_schema needs a json_schema."
            raise bad_request("missing_field", message, "response_format.json_schema")
        grammar = GrammarSpec(
            "json_schema",
            schema_text(form.json_schema.schema_, "response_format.json_schema.schema"),
            strict=bool(form.json_schema.strict),
        )
    return structured_grammar(grammar, structured, "response_format", name)


def output_param(
    structured: StructuredOutputs | None, name: str = "structured_outputs", rival: str = "response_format"
) -> str:
    return rival if structured is None else name


def structured_grammar(
    grammar: GrammarSpec | None, structured: StructuredOutputs | None, rival: str, name: str = "structured_outputs"
) -> GrammarSpec | None:
    """The grammar of the field `name`, or `grammar`, which comes from the field `rival`. Refuses both together."""
    if structured is None:
        return grammar
    ways: list[GrammarSpec] = [] if grammar is None else [grammar]
    if structured.json_ is not None:
        text = schema_text(structured.json_, "structured_outputs.json" if name == "structured_outputs" else name)
        ways.append(GrammarSpec("json_schema", text, strict=False))
    if structured.regex is not None:
        ways.append(GrammarSpec("regex", structured.regex))
    if structured.choice is not None:
        ways.append(GrammarSpec("choice", json.dumps(structured.choice)))
    if structured.grammar is not None:
        ways.append(GrammarSpec("ebnf", structured.grammar))
    if structured.structural_tag is not None:
        tag = structured.structural_tag
        text = tag if isinstance(tag, str) else schema_text(tag, "structured_outputs.structural_tag")
        ways.append(GrammarSpec("structural_tag", text))
    if len(ways) != 1:
        wanted = ""
        if name == "structured_outputs":
            wanted = "exactly one of json, regex, choice, grammar and structural_tag, and "
        raise bad_request("invalid_value", f"{name} needs {wanted}no {rival}.", name)
    return ways[0]
