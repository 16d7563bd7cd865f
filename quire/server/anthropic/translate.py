"""Translates Anthropic's bodies: messages and tools to the form of chat templates, and sampling parameters.

Agent clients put header lines at the top of the system prompt that change on every call, which would defeat the prefix
cache. Lines there that begin with one of `VOLATILE_HEADERS` are dropped; the rest of a prompt is unchanged.
"""

from __future__ import annotations

import json
from typing import Any

from quire.server.anthropic.schemas import (
    AnthropicTool,
    CountBody,
    ImageBlock,
    InputMessage,
    MessagesBody,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from quire.server.http.errors import ApiError, bad_request
from quire.server.schemas import sampling_params, schema_text
from quire.text.conversation import Conversation
from quire.types import GrammarSpec, SamplingParams

# Sent by Claude Code: its version and a hash of the conversation.
VOLATILE_HEADERS = ("x-anthropic-billing-header:",)


def params_of(body: MessagesBody) -> SamplingParams:
    return sampling_params(
        body,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
    )


def conversation_of(body: CountBody) -> Conversation:
    messages: list[dict[str, Any]] = []
    system = _system_text(body)
    if system:
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(body.messages):
        messages += _messages_of(message, index)
    choice = body.tool_choice
    kinds = {"auto": "auto", "any": "required", "none": "none"}
    if choice is not None and choice.type == "tool" and choice.name is None:
        raise bad_request("missing_field", "tool_choice of type tool needs a name.", "tool_choice.name")
    named = choice.name if choice is not None and choice.type == "tool" else None
    return Conversation(
        messages=messages,
        tools=[_tool_of(tool, index) for index, tool in enumerate(body.tools or ())],
        schema_places=[f"tools[{index}].input_schema" for index in range(len(body.tools or ()))],
        tool_choice=named or (kinds[choice.type] if choice is not None else "auto"),
        parallel_tools=not (choice is not None and choice.disable_parallel_tool_use),
        template_kwargs=_template_kwargs(body),
        continue_final=body.messages[-1].role == "assistant",  # the client prefills the answer
        output=_output_of(body),
        output_param="output_format" if body.output_format is not None else "output_config.format",
        thinking_budget=body.thinking.budget_tokens if body.thinking is not None else None,
    )


def without_volatile_headers(text: str) -> str:
    """The text without volatile header lines at its top."""
    while text.lstrip("\n").startswith(VOLATILE_HEADERS):
        _, _, text = text.lstrip("\n").partition("\n")
    return text


def _system_text(body: CountBody) -> str:
    if body.system is None:
        return ""
    texts = [body.system] if isinstance(body.system, str) else [block.text for block in body.system]
    shown = [without_volatile_headers(text) for text in texts]
    return "\n".join(text for text, given in zip(shown, texts, strict=True) if text or not given)


def _template_kwargs(body: CountBody) -> dict[str, Any]:
    kwargs: dict[str, Any] = {}
    if body.thinking is not None:
        kwargs["enable_thinking"] = body.thinking.type != "disabled"
    if body.output_config is not None and body.output_config.effort is not None:
        kwargs["reasoning_effort"] = body.output_config.effort
    return kwargs


def _output_of(body: CountBody) -> GrammarSpec | None:
    form = body.output_format or (body.output_config.format if body.output_config is not None else None)
    if form is None:
        return None
    return GrammarSpec("json_schema", schema_text(form.schema_, "output_config.format.schema"), strict=False)


def _tool_of(tool: AnthropicTool, index: int) -> dict[str, Any]:
    if tool.type not in (None, "custom") or tool.input_schema is None:
        where = f"tools[{index}]"
        if tool.type in (None, "custom"):
            raise bad_request("missing_field", f"The tool {tool.name!r} has no input_schema.", f"{where}.input_schema")
        message = f"Tools of type {tool.type!r} run at the provider and do not exist here."
        raise bad_request("unsupported_tool", message, f"{where}.type")
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _messages_of(message: InputMessage, index: int) -> list[dict[str, Any]]:
    """Messages for the template: each tool result is a message, before the user's text of the same message."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for place, block in enumerate(message.content):
        where = f"messages[{index}].content[{place}]"
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ToolResultBlock):
            text = _result_text(block, where)
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        elif isinstance(block, ThinkingBlock):
            reasoning.append(block.thinking)
        elif not isinstance(block, RedactedThinkingBlock):
            raise _no_images(block, where)
    if results and message.role != "user":
        raise bad_request("invalid_value", "Results of tools belong in a user message.", f"messages[{index}].content")
    if not texts and not calls and (results or reasoning):
        return results or [{"role": message.role, "content": "", "reasoning_content": "\n".join(reasoning)}]
    shown: dict[str, Any] = {"role": message.role, "content": "\n".join(texts)}
    if calls:
        shown["tool_calls"] = calls
    if reasoning:
        shown["reasoning_content"] = "\n".join(reasoning)
    return [*results, shown]


def _result_text(block: ToolResultBlock, where: str) -> str:
    if block.content is None or isinstance(block.content, str):
        text = block.content or ""
    else:
        texts = []
        for place, part in enumerate(block.content):
            if isinstance(part, ImageBlock):
                raise _no_images(part, f"{where}.content[{place}]")
            texts.append(part.tool_name if isinstance(part, ToolReferenceBlock) else part.text)
        text = "\n".join(texts)
    return f"Error: {text}" if block.is_error else text


def _no_images(block: ImageBlock, where: str) -> ApiError:
    return bad_request(
        "unsupported_content", f"The model takes text only, and {where} is of type {block.type!r}.", where
    )
