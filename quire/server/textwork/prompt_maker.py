"""A conversation becomes a prompt: checked, rendered, encoded, with the grammar its tools or its output need.

Which tool-call format and reasoning markers the model speaks is read off its template once. Runs in the text worker.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from quire.server.conversation import Conversation, ConversationLimits, Message
from quire.text.channels import (
    FORMATS,
    ReasoningStyle,
    ToolSpec,
    closes_reasoning,
    opens_reasoning,
    tool_grammar,
)
from quire.text.prompts import encode_chat, render_chat
from quire.text.schema import looked_at
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.types import GrammarSpec, QuireError


@dataclass(slots=True)
class MadePrompt:
    """A conversation's prompt, and how its answer is to be read."""

    text: str
    tokens: list[int]
    grammar: GrammarSpec | None
    grammar_param: str  # which of the client's fields the grammar comes from
    reasoning_open: bool  # the prompt ends inside reasoning
    show_special: bool  # the model's markers are special tokens, so they must reach the parser


@dataclass(frozen=True, slots=True)
class PromptMaker:
    tokenizer: Tokenizer
    template: ChatTemplate
    tool_format: str  # a name of FORMATS, or none
    reasoning: ReasoningStyle | None
    limits: ConversationLimits
    special_in_content: bool

    def make(self, conversation: Conversation, max_tokens: int) -> MadePrompt:
        self.limits.check(conversation)
        segments = render_chat(
            self.template,
            self.tokenizer,
            [_for_template(message) for message in conversation.messages],
            special_in_content=self.special_in_content,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final,
            tools=conversation.tools if conversation.tools and conversation.tool_choice != "none" else None,
            **conversation.template_kwargs,
        )
        text = "".join(segments)
        tokens = encode_chat(self.tokenizer, segments, max_tokens)
        name = tool_format_of(conversation, self.tool_format)
        style, is_open = self.reasoning, opens_reasoning(text, self.reasoning)
        markers = [*(FORMATS[name].markers if name else ()), *((style.open, style.close) if style else ())]
        calls = self._call_grammar(conversation, name)
        output = conversation.output
        if calls is None and output is not None:
            output = looked_at(output, conversation.output_param)
        return MadePrompt(
            text,
            tokens,
            self._after_reasoning(conversation, calls or output, text),
            "tools" if calls is not None else conversation.output_param,
            is_open,
            any(self._special_id(marker) is not None for marker in markers),
        )

    def _special_id(self, text: str) -> int | None:
        ids = self.tokenizer.encode(text, add_special=False)
        return ids[0] if len(ids) == 1 and self.tokenizer.is_special(ids[0]) else None

    def _call_grammar(self, conversation: Conversation, name: str | None) -> GrammarSpec | None:
        """Calls that must come, and their form, are enforced."""
        if name is None:
            return None
        try:
            return tool_grammar(
                name,
                tool_specs(conversation),
                conversation.tool_choice,
                parallel=conversation.parallel_tools,
                special_id=self._special_id,
                leads=self.reasoning is not None,
                answer=conversation.output,
            )
        except QuireError as error:
            raise QuireError(error.code, error.what, error.hint, error.param or "tools") from None

    def _after_reasoning(
        self, conversation: Conversation, grammar: GrammarSpec | None, prompt: str
    ) -> GrammarSpec | None:
        """The grammar, told where reasoning begins and ends, and how long it may take."""
        tokenizer, style = self.tokenizer, self.reasoning
        is_open = opens_reasoning(prompt, style)
        answers = conversation.continue_final or closes_reasoning(prompt, style)
        if style is None or (answers and not is_open):
            return grammar
        budget = _thinking_budget(conversation)
        if grammar is None and budget is None:
            return None
        close = tuple(tokenizer.encode(style.close, add_special=False))
        # Where the prompt does not open it, the model does so itself, or answers at once.
        opening = () if is_open else tuple(tokenizer.encode(style.open, add_special=False))
        return replace(grammar or GrammarSpec("free"), after_reasoning=close, opens_reasoning=opening, budget=budget)


def tool_format_of(conversation: Conversation, tool_format: str) -> str | None:
    """The format in which this conversation's calls are read, or None where none are."""
    wanted = bool(conversation.tools) and conversation.tool_choice != "none" and tool_format != "none"
    return tool_format if wanted else None


def tool_specs(conversation: Conversation) -> list[ToolSpec]:
    functions = [tool["function"] for tool in conversation.tools]
    return [ToolSpec(f["name"], f.get("parameters") or {}, bool(f.get("strict"))) for f in functions]


def _thinking_budget(conversation: Conversation) -> int | None:
    """The client's own, or the one it hands to the template."""
    if conversation.thinking_budget is not None:
        return conversation.thinking_budget
    asked = conversation.template_kwargs.get("thinking_budget")
    return asked if isinstance(asked, int) and not isinstance(asked, bool) and asked >= 0 else None


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
