"""A chat request in one form for every dialect: messages and tools as OpenAI writes them, which chat templates know.

Dialects make a `Conversation`; `PromptMaker` turns it into a prompt inside the text worker.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.server.http.errors import bad_request
from quire.types import GrammarSpec

# Variables of chat templates that a client may set. All others are the server's.
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

Message = dict[str, Any]


@dataclass(slots=True)
class Conversation:
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)  # {"type": "function", "function": {...}}
    schema_places: list[str] = field(default_factory=list)  # where the client wrote each one's parameters
    tool_choice: str = "auto"  # none, auto, required, or the name of a tool
    parallel_tools: bool = True
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    continue_final: bool = False
    add_generation_prompt: bool = True
    output: GrammarSpec | None = None  # what the answer's text must look like
    output_param: str = "response_format"  # which of the client's fields says so
    thinking_budget: int | None = None  # tokens of reasoning after which it is ended


@dataclass(frozen=True, slots=True)
class ConversationLimits:
    max_messages: int
    max_tools: int
    max_schema: int  # characters of one tool's parameters, or of the output's schema or grammar

    def check(self, conversation: Conversation) -> None:
        if not conversation.messages:
            raise bad_request("invalid_value", "messages must hold at least one message.", "messages")
        if len(conversation.messages) > self.max_messages:
            message = f"There are {len(conversation.messages)} messages, the limit is {self.max_messages}."
            raise bad_request("too_many_messages", message, "messages")
        if len(conversation.tools) > self.max_tools:
            message = f"There are {len(conversation.tools)} tools, the limit is {self.max_tools}."
            raise bad_request("too_many_tools", message, "tools")
        self.check_output(conversation.output, conversation.output_param)
        for tool, where in zip(conversation.tools, conversation.schema_places, strict=True):
            _check_tool(tool, where, self.max_schema)
        _check_names(conversation)

    def check_output(self, output: GrammarSpec | None, param: str = "response_format") -> GrammarSpec | None:
        if output is not None and len(output.value) > self.max_schema:
            message = f"The schema or grammar has {len(output.value)} characters, the limit is {self.max_schema}."
            raise bad_request("schema_too_large", message, param)
        return output


def _check_names(conversation: Conversation) -> None:
    names = [tool["function"]["name"] for tool in conversation.tools]
    if len(set(names)) != len(names):
        raise bad_request("invalid_tool", "Two tools have the same name.", "tools")
    unknown = sorted(set(conversation.template_kwargs) - TEMPLATE_KWARGS)
    if unknown:
        message = f"chat_template_kwargs may not hold {unknown[0]!r}. Allowed: {', '.join(sorted(TEMPLATE_KWARGS))}."
        raise bad_request("invalid_value", message, "chat_template_kwargs")
    wants_tool = conversation.tool_choice not in ("none", "auto")
    if wants_tool and not names:
        raise bad_request("invalid_value", "tool_choice asks for a tool but there are no tools.", "tool_choice")
    if wants_tool and conversation.tool_choice != "required" and conversation.tool_choice not in names:
        message = f"tool_choice names {conversation.tool_choice!r}, which is not among the tools."
        raise bad_request("invalid_value", message, "tool_choice")


def _check_tool(tool: Mapping[str, Any], where: str, max_schema: int) -> None:
    function = tool["function"]
    schema = function.get("parameters")
    if schema is None:
        return
    if schema.get("type", "object") != "object":
        message = f"The parameters of tool {function['name']!r} must be a JSON schema of type object."
        raise bad_request("invalid_tool", message, where)
    size = len(json.dumps(schema))
    if size > max_schema:
        message = f"The parameters of tool {function['name']!r} have {size} characters, the limit is {max_schema}."
        raise bad_request("schema_too_large", message, where)
