"""A conversation becomes a prompt, and the parser that reads the answer: the same for every dialect.

Dialects bring messages and tools in OpenAI's form, which is also the form chat templates know. What is decided here:
which tool-call format and reasoning markers the model speaks, and which grammar a `tool_choice` or an output schema
needs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quire.config import Config
from quire.edge import Edge
from quire.server.errors import bad_request
from quire.server.sample import ChannelParser
from quire.text.channels import (
    FORMATS,
    ToolSpec,
    choose_format,
    choose_reasoning,
    closes_reasoning,
    make_channel_parser,
    opens_reasoning,
    tool_grammar,
)
from quire.text.template import template_for
from quire.text.tokenizer import Tokenizer
from quire.types import GrammarSpec, QuireError, SamplingParams

INLINE_CHARS = 4096  # shorter texts are tokenized on the event loop: a thread would cost more
# Variables of chat templates that a client may set. What else a template reads is the server's business.
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


@dataclass(slots=True)
class ChatPrompt:
    text: str
    tokens: list[int]
    make_parser: Callable[[], ChannelParser]
    grammar: GrammarSpec | None
    grammar_param: str  # which of the client's fields the grammar comes from, for whoever is told that it is wrong
    show_special: bool  # the model's markers are special tokens, so they must reach the parser

    def fit(self, params: SamplingParams) -> SamplingParams:
        """The parameters, with what this conversation asks of the output."""
        return replace(
            params, grammar=self.grammar, skip_special_tokens=params.skip_special_tokens and not self.show_special
        )


class ChatPrompts:
    def __init__(self, edge: Edge, config: Config):
        self._edge = edge
        self._max_messages = config.server.max_messages
        self._max_tools = config.server.max_tools
        self._max_schema = config.server.max_schema
        source = _template_source(edge.tokenizer, config.model.chat_template)
        self._tool_format = config.server.tool_format or choose_format(source) or "json"
        if self._tool_format not in FORMATS and self._tool_format != "none":
            make_channel_parser(self._tool_format)  # says which there are
        self._reasoning = choose_reasoning(source)

    @property
    def tool_format(self) -> str:
        return self._tool_format

    async def make(self, conversation: Conversation) -> ChatPrompt:
        """Render and tokenize, off the event loop unless it is short."""
        self._check(conversation)
        num_chars = sum(_num_chars(message.get("content")) for message in conversation.messages)
        if num_chars + 512 * len(conversation.tools) > INLINE_CHARS:
            return await asyncio.to_thread(self._make, conversation)
        return self._make(conversation)

    async def encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str) and len(prompt) > INLINE_CHARS:
            return await asyncio.to_thread(self._edge.encode, prompt)
        return self._edge.encode(prompt)

    def check_output(self, output: GrammarSpec | None, param: str = "response_format") -> GrammarSpec | None:
        if output is not None and len(output.value) > self._max_schema:
            message = f"The schema or grammar has {len(output.value)} characters, the limit is {self._max_schema}."
            raise bad_request("schema_too_large", message, param)
        return output

    def _check(self, conversation: Conversation) -> None:
        if not conversation.messages:
            raise bad_request("invalid_value", "messages must hold at least one message.", "messages")
        if len(conversation.messages) > self._max_messages:
            message = f"There are {len(conversation.messages)} messages, the limit is {self._max_messages}."
            raise bad_request("too_many_messages", message, "messages")
        if len(conversation.tools) > self._max_tools:
            message = f"There are {len(conversation.tools)} tools, the limit is {self._max_tools}."
            raise bad_request("too_many_tools", message, "tools")
        self.check_output(conversation.output, conversation.output_param)
        for tool, where in zip(conversation.tools, conversation.schema_places, strict=True):
            _check_tool(tool, where, self._max_schema)
        names = [tool["function"]["name"] for tool in conversation.tools]
        if len(set(names)) != len(names):
            raise bad_request("invalid_tool", "Two tools have the same name.", "tools")
        unknown = sorted(set(conversation.template_kwargs) - TEMPLATE_KWARGS)
        if unknown:
            message = (
                f"chat_template_kwargs may not hold {unknown[0]!r}. Allowed: {', '.join(sorted(TEMPLATE_KWARGS))}."
            )
            raise bad_request("invalid_value", message, "chat_template_kwargs")
        wants_tool = conversation.tool_choice not in ("none", "auto")
        if wants_tool and not names:
            raise bad_request("invalid_value", "tool_choice asks for a tool but there are no tools.", "tool_choice")
        if wants_tool and conversation.tool_choice != "required" and conversation.tool_choice not in names:
            message = f"tool_choice names {conversation.tool_choice!r}, which is not among the tools."
            raise bad_request("invalid_value", message, "tool_choice")

    def _make(self, conversation: Conversation) -> ChatPrompt:
        text = self._edge.template().render(
            [_for_template(message) for message in conversation.messages],
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final,
            tools=conversation.tools if conversation.tools and conversation.tool_choice != "none" else None,
            **conversation.template_kwargs,
        )
        tokenizer = self._edge.tokenizer
        if tokenizer is None:
            raise QuireError("no_tokenizer", "This model has no tokenizer.")
        tokens = tokenizer.encode(text, add_special=False)  # the template writes BOS itself
        specs = [_tool_spec(tool) for tool in conversation.tools]
        reads_tools = bool(specs) and conversation.tool_choice != "none" and self._tool_format != "none"
        name = self._tool_format if reads_tools else None
        style, is_open = self._reasoning, opens_reasoning(text, self._reasoning)
        markers = [*(FORMATS[name].markers if name else ()), *((style.open, style.close) if style else ())]
        calls = self._call_grammar(conversation, specs, name)
        grammar = self._after_reasoning(conversation, calls or conversation.output, text)
        return ChatPrompt(
            text,
            tokens,
            lambda: make_channel_parser(name, reasoning=style or False, reasoning_open=is_open, tools=specs),
            grammar,
            "tools" if calls is not None else conversation.output_param,
            any(_special_id(tokenizer, marker) is not None for marker in markers),
        )

    def _call_grammar(self, conversation: Conversation, specs: list[ToolSpec], name: str | None) -> GrammarSpec | None:
        """Calls that must come, and their form, are enforced."""
        tokenizer = self._edge.tokenizer
        if name is None or tokenizer is None:
            return None
        return tool_grammar(
            name,
            specs,
            conversation.tool_choice,
            parallel=conversation.parallel_tools,
            special_id=lambda text: _special_id(tokenizer, text),
            leads=self._reasoning is not None,
            answer=conversation.output,
        )

    def _after_reasoning(
        self, conversation: Conversation, grammar: GrammarSpec | None, prompt: str
    ) -> GrammarSpec | None:
        """The grammar, told where reasoning begins and ends, and how long it may take."""
        tokenizer, style = self._edge.tokenizer, self._reasoning
        is_open = opens_reasoning(prompt, style)
        answers = conversation.continue_final or closes_reasoning(prompt, style)
        if style is None or tokenizer is None or (answers and not is_open):
            return grammar
        budget = _thinking_budget(conversation)
        if grammar is None and budget is None:
            return None
        close = tuple(tokenizer.encode(style.close, add_special=False))
        # Where the prompt does not open it, the model does so itself, or answers at once.
        opening = () if is_open else tuple(tokenizer.encode(style.open, add_special=False))
        return replace(grammar or GrammarSpec("free"), after_reasoning=close, opens_reasoning=opening, budget=budget)


def _thinking_budget(conversation: Conversation) -> int | None:
    """The client's own, or the one it hands to the template."""
    if conversation.thinking_budget is not None:
        return conversation.thinking_budget
    asked = conversation.template_kwargs.get("thinking_budget")
    return asked if isinstance(asked, int) and not isinstance(asked, bool) and asked >= 0 else None


def _template_source(tokenizer: Tokenizer | None, override: str | None) -> str:
    if override is not None and tokenizer is not None:
        template_for(tokenizer, override)  # a wrong path is an error at start
        if "{{" in override or "{%" in override:
            return override
        with open(override, encoding="utf-8") as file:
            return file.read()
    return (tokenizer.chat_template if tokenizer is not None else None) or ""


def _special_id(tokenizer: Tokenizer, text: str) -> int | None:
    ids = tokenizer.encode(text, add_special=False)
    return ids[0] if len(ids) == 1 and tokenizer.is_special(ids[0]) else None


def _num_chars(content: Any) -> int:
    if isinstance(content, str):
        return len(content)
    return sum(len(part.get("text", "")) for part in content) if isinstance(content, list) else 0


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


def _tool_spec(tool: Mapping[str, Any]) -> ToolSpec:
    function = tool["function"]
    return ToolSpec(function["name"], function.get("parameters") or {}, bool(function.get("strict")))


def _for_template(message: Message) -> Message:
    """Templates want the arguments of earlier calls as objects; clients send them as text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_parsed_call(call) for call in calls]}


def _parsed_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
