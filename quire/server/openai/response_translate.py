"""Translates bodies of `/v1/responses`: items to messages, flat tools to functions."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

from quire.server.collector import new_id
from quire.server.http.errors import ApiError, bad_request
from quire.server.openai.response_schemas import InputItem, InputPart, NamedResponseTool, ResponsesBody, ResponseTool
from quire.server.openai.translate import DEFAULT_VERBOSITY, output_param, structured_grammar
from quire.server.schemas import length_of, sampling_params, schema_text, stops_of
from quire.text.conversation import Conversation
from quire.types import GrammarSpec, SamplingParams

Message = dict[str, Any]
# Values of `include`.
SHOWN_LOGPROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"
_SEAL = "quire1."  # what `encrypted_content` begins with


def params_of(body: ResponsesBody) -> SamplingParams:
    return sampling_params(
        body,
        max_tokens=length_of(body.max_output_tokens),
        stop=stops_of(body.stop),
        logprobs=shown_logprobs(body),
    )


def shown_logprobs(body: ResponsesBody) -> int | None:
    """The number of alternatives per token; None: no log-probabilities are wanted."""
    wanted = SHOWN_LOGPROBS in (body.include or ())
    return body.top_logprobs if body.top_logprobs is not None or not wanted else 0


def check_include(include: list[str] | None) -> None:
    """Refuse what a reply can't include, by name."""
    for index, name in enumerate(include or ()):
        if name not in (SHOWN_LOGPROBS, SEALED_REASONING):
            message = f"A reply can't include {name[:200]!r}, only {SHOWN_LOGPROBS} and {SEALED_REASONING}."
            raise bad_request("unsupported_parameter", message, f"include[{index}]")


def sealed(text: str) -> str:
    """The text of a reasoning item as `encrypted_content`. It is encoded, not secret: the item shows the text too. A
    client that sends the item back continues the reasoning without a stored response."""
    return _SEAL + base64.urlsafe_b64encode(text.encode("utf-8", "replace")).decode("ascii")


def unsealed(content: str, where: str) -> str:
    try:
        if content.startswith(_SEAL):
            return base64.urlsafe_b64decode(content.removeprefix(_SEAL)).decode("utf-8")
    except ValueError:
        pass
    raise bad_request("invalid_value", f"{where} was not written by this server.", where)


def items_of(body: ResponsesBody) -> list[InputItem]:
    return [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input


def conversation_of(body: ResponsesBody, messages: list[Message]) -> Conversation:
    """The conversation of a body. `messages`: the earlier conversation and the new input. Instructions apply to this
    call only."""
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning is not None and body.reasoning.effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning.effort)
        if body.reasoning.effort == "none":
            kwargs.setdefault("enable_thinking", False)
    if body.text is not None and body.text.verbosity not in (None, DEFAULT_VERBOSITY):
        kwargs.setdefault("verbosity", body.text.verbosity)
    choice = body.tool_choice
    tools = _tools_of(body.tools or ())
    return Conversation(
        messages=[*system, *messages],
        tools=list(tools.values()),
        schema_places=[f"{where}.parameters" for where in tools],
        tool_choice=choice.name if isinstance(choice, NamedResponseTool) else choice or "auto",
        parallel_tools=body.parallel_tool_calls is not False,
        template_kwargs=kwargs,
        output=_output_of(body),
        output_param=output_param(body.structured_outputs, rival="text.format"),
        thinking_budget=body.thinking_budget,
    )


def full_name(namespace: str | None, name: str) -> str:
    """The model's name of a function, which includes its namespace."""
    return name if namespace is None else f"{namespace}.{name}"


def namespaced(tools: Iterable[ResponseTool]) -> dict[str, tuple[str, str]]:
    """Maps the model's names of functions in namespaces to namespace and name."""
    spaces = [tool for tool in tools if tool.type == "namespace" and tool.name is not None]
    return {
        full_name(space.name, tool.name): (space.name, tool.name)  # type: ignore[misc]
        for space in spaces
        for tool in space.tools or ()
        if tool.name is not None
    }


def _tools_of(tools: Iterable[ResponseTool]) -> dict[str, dict[str, Any]]:
    """All functions, including those in namespaces, by their place in the body."""
    found: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type != "namespace":
            found[where] = _tool_of(tool, where)
            continue
        name = _needed(tool.name, f"{where}.name")
        for place, inner in enumerate(tool.tools or ()):
            one = found[f"{where}.tools[{place}]"] = _tool_of(inner, f"{where}.tools[{place}]")
            one["function"]["name"] = full_name(name, one["function"]["name"])
    return found


def _tool_of(tool: ResponseTool, where: str) -> dict[str, Any]:
    if tool.type != "function":
        message = f"Tools of type {tool.type[:100]!r} run at the provider and do not exist here."
        raise bad_request("unsupported_tool", message, f"{where}.type")
    if tool.name is None:
        raise bad_request("missing_field", f"The field '{where}.name' is missing.", f"{where}.name")
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _output_of(body: ResponsesBody) -> GrammarSpec | None:
    form = body.text.format if body.text is not None else None
    grammar = None
    if form is not None and form.type == "json_object":
        grammar = GrammarSpec("json_object")
    elif form is not None and form.type == "json_schema":
        if form.schema_ is None:
            raise bad_request("missing_field", "text.format of type json_schema needs a schema.", "text.format.schema")
        grammar = GrammarSpec("json_schema", schema_text(form.schema_, "text.format.schema"), strict=bool(form.strict))
    return structured_grammar(grammar, body.structured_outputs, "text.format")


def messages_of(items: list[InputItem]) -> list[Message]:
    """The messages of items. Consecutive calls and the text before them become one assistant message."""
    messages: list[Message] = []
    reasoning = ""
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if item.type == "reasoning":
            reasoning = _text_of(item.content or item.summary or [], where)
            if not reasoning and item.encrypted_content:
                reasoning = unsealed(item.encrypted_content, f"{where}.encrypted_content")
        elif item.type == "function_call":
            called = full_name(item.namespace, _needed(item.name, f"{where}.name"))
            function = {"name": called, "arguments": item.arguments or "{}"}
            call = {"id": _needed(item.call_id, f"{where}.call_id"), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif item.type == "function_call_output":
            text = _text_of(item.output or "", f"{where}.output")
            messages.append(
                {"role": "tool", "tool_call_id": _needed(item.call_id, f"{where}.call_id"), "content": text}
            )
        else:
            role = _needed(item.role, f"{where}.role")
            text = _text_of(_needed(item.content, f"{where}.content"), f"{where}.content")
            messages.append({"role": "system" if role == "developer" else role, "content": text})
        if reasoning and messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("reasoning_content", reasoning)
            reasoning = ""
    return messages


def _needed(value: Any, where: str) -> Any:
    if value is None:
        raise bad_request("missing_field", f"The field {where!r} is missing.", where)
    return value


def _text_of(content: str | list[InputPart], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for place, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise _not_text(part, f"{where}[{place}]")
        texts.append(text)
    return "\n".join(texts)


def _not_text(part: InputPart, where: str) -> ApiError:
    if part.type in ("input_image", "input_file", "input_audio"):
        return bad_request(
            "unsupported_content", f"The model takes text only, and {where} is of type {part.type!r}.", where
        )
    return bad_request("missing_field", f"The part at {where} has no text.", where)


def stored_items(items: list[InputItem]) -> list[dict[str, Any]]:
    """The input as listed by `input_items`: each item with an id, text as parts."""
    prefixes = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}
    shown = []
    for item in items:
        body = item.model_dump(exclude_none=True)
        body.setdefault("id", new_id(prefixes[item.type]))
        body.setdefault("status", "completed")
        if item.type == "message" and isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            body["content"] = [{"type": kind, "text": item.content}]
        shown.append(body)
    return shown
