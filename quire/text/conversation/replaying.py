"""Prepares a conversation for its template: earlier calls, results and reasoning in the forms that the template takes.

A template without a place for tools gets them in a message, with an example in the model's format of calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from quire.text.channels import ToolFormat
from quire.text.channels.probe import TOOL_VARIABLES, Replay, TemplateFormats
from quire.text.conversation.request import Message

_EXAMPLE = ("tool_name", '{"argument": "value"}')


def messages_for_template(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], formats: TemplateFormats
) -> list[Message]:
    """The messages as the template takes them. `tools` are those that the model may call."""
    replay = formats.replay
    prepared = [_prepared(message, formats) for message in messages]
    if tools and not replay.shows_tools and formats.tools is not None:
        prepared = _with_tools(prepared, tool_prompt(tools, formats.tools), replay)
    if not replay.shows_results:
        prepared = _joined_users(prepared)
    return prepared


def template_variables(tools: Sequence[dict[str, Any]], replay: Replay) -> dict[str, Any]:
    """The tools under the other name that the template looks for, if any."""
    if not tools or replay.tool_variable not in TOOL_VARIABLES:
        return {}
    return {
        replay.tool_variable: TOOL_VARIABLES[replay.tool_variable](list(tools)),
        "datetime": f"{datetime.now():%Y-%m-%d}",
    }


def tool_prompt(tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat) -> str:
    """Instructions for a model whose template has no place for tools."""
    listed = "\n".join(json.dumps(dict(tool["function"]), ensure_ascii=False) for tool in tools)
    return (
        "You have access to these tools, one per line, each with the JSON schema of its parameters:\n"
        f"{listed}\n\n"
        "If a tool helps, call it by writing exactly this form, with the tool's name and its arguments, and stop:\n"
        f"{tool_format.write([_EXAMPLE]).strip()}\n"
        "Several calls may follow one another. You then get their results. Otherwise answer in plain words."
    )


def _prepared(message: Message, formats: TemplateFormats) -> Message:
    if not isinstance(message, dict):
        return message
    replay, role = formats.replay, message.get("role")
    if role == "tool" and not replay.shows_results:
        return {"role": "user", "content": f"Result of the tool {message.get('name') or ''}:\n{_text(message)}"}
    if role != "assistant":
        return message
    thought = next((message[key] for key in ("reasoning_content", "reasoning") if message.get(key)), None)
    if thought is not None and replay.reasoning_key is not None:
        message = {**message, replay.reasoning_key: thought}
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not replay.shows_calls and formats.tools is not None:
        written = formats.tools.write([_named(call) for call in calls])
        content = "".join(part for part in (_text(message), written) if part)
        return {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": content}
    message = {**message, "tool_calls": [_in_form(call, replay.form.arguments_as_text) for call in calls]}
    if not message.get("content"):
        message["content"] = replay.form.content
    elif thought is not None and not replay.content_beside_thought and replay.reasoning_key is not None:
        message[replay.reasoning_key] = f"{thought}\n{_text(message)}"
        message["content"] = ""
    return message


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _named(call: Mapping[str, Any]) -> tuple[str, str]:
    function = _in_form(call, as_text=True)["function"]
    return str(function["name"]), str(function["arguments"])


def _in_form(call: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    """The call with its arguments as an object, or as text. Text that is no JSON object stays as it is."""
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str) or arguments is None:
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return dict(call)
        arguments = parsed if isinstance(parsed, dict) else arguments
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _with_tools(messages: list[Message], text: str, replay: Replay) -> list[Message]:
    """The messages with the description of the tools in the system message, or in the user's first."""
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    if replay.takes_system:
        if first.get("role") == "system":
            return [{**first, "content": f"{_text(first)}\n\n{text}"}, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]
    for index, message in enumerate(messages):
        if isinstance(message, dict) and message.get("role") == "user":
            changed = {**message, "content": f"{text}\n\n{_text(message)}"}
            return [*messages[:index], changed, *messages[index + 1 :]]
    return [{"role": "user", "content": text}, *messages]


def _joined_users(messages: Sequence[Message]) -> list[Message]:
    """The messages with neighbouring ones of the user joined: such templates want the roles to alternate."""
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is not None and isinstance(message, dict) and message.get("role") == last.get("role") == "user":
            joined[-1] = {**last, "content": f"{_text(last)}\n\n{_text(message)}"}
        else:
            joined.append(message)
    return joined
