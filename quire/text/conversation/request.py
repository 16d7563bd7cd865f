"""A chat turn's request: messages and tools in OpenAI's form, which chat templates expect, and their validation.

`LLM.chat` and each dialect of the server build a `Conversation`; `ChatRenderer` renders it as a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.types import GrammarSpec, QuireError

# Variables that a client of the server may set whatever the template is.
TEMPLATE_KWARGS = frozenset(
    {
        "enable_thinking",
        "thinking",
        "thinking_budget",
        "reasoning_effort",
        "preserve_thinking",
        "clear_thinking",
        "date_string",
        "builtin_tools",
        "tools_in_user_message",
        "documents",
    }
)

# Variables that only the server sets.
OWN_VARIABLES = frozenset(
    {
        "messages",
        "tools",
        "available_tools",
        "xml_tools",
        "functions",
        "add_generation_prompt",
        "continue_final_message",
        "datetime",
        "bos_token",
        "eos_token",
        "pad_token",
        "unk_token",
        "sep_token",
        "cls_token",
        "mask_token",
    }
)

Message = dict[str, Any]


@dataclass(slots=True)
class Conversation:
    """Messages, tools and options of one chat turn. Neither the shape nor the size of its values is checked yet."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)  # {"type": "function", "function": {...}}
    schema_places: list[str] = field(default_factory=list)  # the caller's name for each tool's parameters, for errors
    tool_choice: str = "auto"  # none, auto, required, or the name of a tool
    parallel_tools: bool = True
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    continue_final: bool = False
    add_generation_prompt: bool = True
    output: GrammarSpec | None = None  # grammar of the answer's text
    output_param: str = "response_format"  # the caller's name for `output`, for errors
    thinking_budget: int | None = None  # reasoning tokens after which reasoning is closed


def make_conversation(
    messages: Sequence[Any],
    *,
    tools: Sequence[Any] | None = None,
    tool_choice: str = "auto",
    parallel_tools: bool = True,
    output: GrammarSpec | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Conversation:
    """Build a conversation from a Python caller's arguments and check their shape. `template_kwargs` may also hold
    `add_generation_prompt` and `continue_final_message`."""
    kwargs = dict(template_kwargs or {})
    for index, tool in enumerate(tools or ()):
        _check_tool(tool, index)
    for index, message in enumerate(messages):
        _check_calls(message, index)
    if not isinstance(tool_choice, str):
        what = f"tool_choice is of type {type(tool_choice).__name__}."
        raise QuireError("invalid_value", what, "Give auto, none, required or a tool's name.", "tool_choice")
    return Conversation(
        messages=list(messages),
        tools=list(tools or ()),
        schema_places=[f"tools[{index}].function.parameters" for index in range(len(tools or ()))],
        tool_choice=tool_choice,
        parallel_tools=parallel_tools,
        continue_final=bool(kwargs.pop("continue_final_message", False)),
        add_generation_prompt=bool(kwargs.pop("add_generation_prompt", True)),
        template_kwargs=kwargs,
        output=output,
        output_param="grammar",
    )


@dataclass(frozen=True, slots=True)
class ConversationLimits:
    """Bounds on a client's conversation. `LLM.chat` has none."""

    max_messages: int
    max_tools: int
    max_schema: int  # characters of one tool's parameters, or of the output's schema or grammar

    def check(self, conversation: Conversation, variables: Collection[str] = ()) -> None:
        """Raise for a conversation beyond the limits. `variables`: those that the model's template reads."""
        if not conversation.messages:
            raise QuireError("invalid_value", "messages must hold at least one message.", param="messages")
        if len(conversation.messages) > self.max_messages:
            what = f"There are {len(conversation.messages)} messages, the limit is {self.max_messages}."
            raise QuireError("too_many_messages", what, param="messages")
        if len(conversation.tools) > self.max_tools:
            what = f"There are {len(conversation.tools)} tools, the limit is {self.max_tools}."
            raise QuireError("too_many_tools", what, param="tools")
        self.check_output(conversation.output, conversation.output_param)
        for tool, where in zip(conversation.tools, conversation.schema_places, strict=True):
            self._check_size(tool, where)
        self._check_template_kwargs(conversation, variables)

    def _check_template_kwargs(self, conversation: Conversation, variables: Collection[str]) -> None:
        allowed = TEMPLATE_KWARGS | (frozenset(variables) - OWN_VARIABLES)
        unknown = sorted(set(conversation.template_kwargs) - allowed)
        if unknown:
            shown = repr(unknown[0][:200])
            what = f"chat_template_kwargs may not hold {shown}, which the model's chat template does not read."
            hint = f"Allowed: {', '.join(sorted(allowed))}."
            raise QuireError("invalid_value", what, hint, "chat_template_kwargs")
        size = len(json.dumps(conversation.template_kwargs)) if conversation.template_kwargs else 0
        if size > self.max_schema:
            what = f"The chat_template_kwargs have {size} characters, the limit is {self.max_schema}."
            raise QuireError("schema_too_large", what, param="chat_template_kwargs")

    def check_output(self, output: GrammarSpec | None, param: str = "response_format") -> GrammarSpec | None:
        if output is not None and len(output.value) > self.max_schema:
            what = f"The schema or grammar has {len(output.value)} characters, the limit is {self.max_schema}."
            raise QuireError("schema_too_large", what, param=param)
        return output

    def _check_size(self, tool: Mapping[str, Any], where: str) -> None:
        schema = tool["function"].get("parameters")
        size = 0 if schema is None else len(json.dumps(schema))
        if size > self.max_schema:
            name = tool["function"]["name"]
            what = f"The parameters of tool {name!r} have {size} characters, the limit is {self.max_schema}."
            raise QuireError("schema_too_large", what, param=where)


def check_tools(conversation: Conversation) -> None:
    """Refuse tools with equal names, parameters other than an object, and a `tool_choice` that names no tool."""
    for tool, where in zip(conversation.tools, conversation.schema_places, strict=True):
        schema = tool["function"].get("parameters")
        if schema is not None and schema.get("type", "object") != "object":
            name = tool["function"]["name"]
            what = f"The parameters of tool {name!r} must be a JSON schema of type object."
            raise QuireError("invalid_tool", what, param=where)
    names = [tool["function"]["name"] for tool in conversation.tools]
    if len(set(names)) != len(names):
        raise QuireError("invalid_tool", "Two tools have the same name.", param="tools")
    wants_tool = conversation.tool_choice not in ("none", "auto")
    if wants_tool and not names:
        raise QuireError("invalid_value", "tool_choice asks for a tool but there are no tools.", param="tool_choice")
    if wants_tool and conversation.tool_choice != "required" and conversation.tool_choice not in names:
        what = f"tool_choice names {conversation.tool_choice!r}, which is not among the tools."
        raise QuireError("invalid_value", what, param="tool_choice")


def _check_tool(tool: Any, index: int) -> None:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        hint = 'Give {"type": "function", "function": {"name": ..., "parameters": {...}}}.'
        raise QuireError("invalid_tool", f"tools[{index}] has no function with a name.", hint, "tools")
    if not isinstance(function.get("parameters"), (dict, type(None))):
        what = f"The parameters of tool {function['name']!r} are no object."
        raise QuireError("invalid_tool", what, "Give a JSON schema of type object.", "tools")


def _check_calls(message: Any, index: int) -> None:
    """Earlier calls in a message must have a function with a name and arguments; `ChatTemplate` checks the rest."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    for call in calls if isinstance(calls, list) else (() if calls is None else (calls,)):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or "name" not in function or "arguments" not in function:
            what = f"messages[{index}] holds a tool call without a function, its name or its arguments."
            hint = 'Give {"id": ..., "type": "function", "function": {"name": ..., "arguments": "{...}"}}.'
            raise QuireError("invalid_parameter", what, hint, "messages")
