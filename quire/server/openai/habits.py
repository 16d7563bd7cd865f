"""Fields that clients of vLLM, llama.cpp and OpenAI's older API send: each is translated to the field it stands for.

Only spellings with one possible meaning are taken. `translate` calls this module; errors name the client's field.
"""

from __future__ import annotations

import json
from typing import Any

from quire.server.http.errors import bad_request
from quire.server.openai.schemas import (
    ChatBody,
    ChatMessage,
    ChatTool,
    ChatToolCall,
    FunctionCall,
    NamedTool,
    OpenAISampling,
    StructuredOutputs,
)

STRUCTURES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}


def structure_of(body: OpenAISampling) -> tuple[StructuredOutputs | None, str]:
    """The constraint on the output beside `response_format`, and the client's name of its field."""
    given = [name for name in STRUCTURES if getattr(body, name) not in (None, "")]
    if not given:
        return body.structured_outputs, "structured_outputs"
    if len(given) > 1 or body.structured_outputs is not None:
        rival = given[1] if len(given) > 1 else "structured_outputs"
        raise bad_request("invalid_value", f"{given[0]} and {rival} both constrain the output. Send one.", given[0])
    name = given[0]
    value = getattr(body, name)
    if STRUCTURES[name] == "json" and isinstance(value, str):
        value = _object_in(value, name)
    return StructuredOutputs(**{STRUCTURES[name]: value}), name


def _object_in(text: str, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise bad_request("invalid_schema", f"{name} is text that is no JSON object.", name)
    return value


def with_tools(body: ChatBody) -> ChatBody:
    """The body with `functions` and `function_call`, of OpenAI's API before tools, as tools and their messages."""
    has_old = any(message.role == "function" or message.function_call is not None for message in body.messages)
    if body.functions is None and body.function_call is None and not has_old:
        return body
    if body.functions is not None and body.tools is not None:
        raise bad_request("invalid_value", "functions and tools are one thing. Send tools.", "functions")
    choice = body.tool_choice
    if body.function_call is not None:
        if choice is not None:
            raise bad_request("invalid_value", "function_call and tool_choice are one thing.", "function_call")
        named = body.function_call
        choice = named if isinstance(named, str) else NamedTool(type="function", function=named)
    tools = body.tools
    if body.functions is not None:
        tools = [ChatTool(type="function", function=function) for function in body.functions]
    parallel = False if body.functions is not None else body.parallel_tool_calls
    messages = _tool_messages(body.messages) if has_old else body.messages
    return body.model_copy(
        update={"tools": tools, "tool_choice": choice, "messages": messages, "parallel_tool_calls": parallel}
    )


def _tool_messages(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Calls and results in the old form, each result with the id of the call before it."""
    changed: list[ChatMessage] = []
    number = 0
    for index, message in enumerate(messages):
        if message.function_call is not None:
            number += 1
            call = ChatToolCall(id=f"call_{number}", function=FunctionCall(**message.function_call.model_dump()))
            changed.append(message.model_copy(update={"tool_calls": [call], "function_call": None}))
        elif message.role == "function":
            if message.name is None:
                where = f"messages[{index}].name"
                raise bad_request("missing_field", f"The field {where!r} is missing.", where)
            changed.append(message.model_copy(update={"role": "tool", "tool_call_id": f"call_{number}"}))
        else:
            changed.append(message)
    return changed
