"""Turns a conversation into a prompt: checks, renders and encodes it, and builds the grammar of its answer.

The tool-call format and the reasoning markers are read from the model's chat template. The server renders in its text
worker, `LLM.chat` in the calling thread.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.text.channels import (
    FORMATS,
    ChannelParser,
    ReasoningStyle,
    ToolSpec,
    choose_format,
    choose_reasoning,
    closes_reasoning,
    make_channel_parser,
    opens_reasoning,
    tool_grammar,
)
from quire.text.conversation.answer import AnswerFormat, AssistantMessage
from quire.text.conversation.request import Conversation, ConversationLimits, Message, check_tools
from quire.text.prompts import encode_chat, render_chat
from quire.text.schema import with_schema_warnings
from quire.text.stream import TextStream
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.types import GrammarSpec, QuireError, SamplingParams


@dataclass(slots=True)
class ChatTurn:
    """A conversation's prompt, the grammar of its answer, and the format in which the answer is parsed."""

    text: str
    tokens: list[int]
    grammar: GrammarSpec | None
    grammar_param: str  # the caller's name for the field that the grammar comes from, for errors
    show_special: bool  # the model's markers are special tokens, so they must reach the parser
    format: AnswerFormat

    def make_parser(self) -> ChannelParser:
        return self.format.make_parser()

    def fit(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with this turn's grammar, and with special tokens shown where the parser needs them."""
        shown = params.skip_special_tokens and not self.show_special
        return replace(params, grammar=self.grammar, skip_special_tokens=shown)

    def parse(
        self,
        token_ids: Sequence[int],
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        stop_ids: Collection[int],
        cut: bool,
    ) -> AssistantMessage:
        """Parse an answer's tokens. `cut`: the answer ended at a limit, not by the model."""
        stream = TextStream(tokenizer, self.fit(params), stop_ids)
        text = stream.push(token_ids)
        text += stream.finish()
        return self.format.parse(text, cut=cut or isinstance(stream.stop_reason, str))


@dataclass(frozen=True, slots=True)
class ChatRenderer:
    """Renders conversations for one model, in the formats of its chat template."""

    tokenizer: Tokenizer
    template: ChatTemplate
    tool_format: str  # a name of FORMATS, or none
    reasoning: ReasoningStyle | None
    limits: ConversationLimits | None  # None: the caller is trusted
    special_in_content: bool

    @classmethod
    def from_template(
        cls,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        tool_format: str | None = None,
        limits: ConversationLimits | None = None,
        special_in_content: bool = False,
    ) -> ChatRenderer:
        """Return a renderer for the formats in the template. `tool_format` overrides the template's format of calls."""
        name, style = choose_tool_format(template.source, tool_format), choose_reasoning(template.source)
        return cls(tokenizer, template, name, style, limits, special_in_content)

    def render(self, conversation: Conversation, max_tokens: int) -> ChatTurn:
        """Return the turn's prompt, of at most `max_tokens` tokens. Raises `QuireError` for an invalid conversation."""
        if self.limits is not None:
            self.limits.check(conversation)
        check_tools(conversation)
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
        style, is_open = self.reasoning, opens_reasoning(text, self.reasoning)
        form = answer_format(conversation, self.tool_format, style, is_open)
        name = form.tool_format
        markers = [*(FORMATS[name].markers if name else ()), *((style.open, style.close) if style else ())]
        calls = self._call_grammar(conversation, form)
        output = conversation.output
        if calls is None and output is not None:
            output = with_schema_warnings(output, conversation.output_param)
        return ChatTurn(
            text,
            tokens,
            self._after_reasoning(conversation, calls or output, text),
            "tools" if calls is not None else conversation.output_param,
            any(self._special_id(marker) is not None for marker in markers),
            form,
        )

    def _special_id(self, text: str) -> int | None:
        ids = self.tokenizer.encode(text, add_special=False)
        return ids[0] if len(ids) == 1 and self.tokenizer.is_special(ids[0]) else None

    def _call_grammar(self, conversation: Conversation, form: AnswerFormat) -> GrammarSpec | None:
        """Return the grammar that enforces required calls and the format of calls; None: nothing is enforced."""
        if form.tool_format is None:
            return None
        try:
            return tool_grammar(
                form.tool_format,
                form.tools,
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
        """Return the grammar with the markers of reasoning, which stays free, and with its token budget."""
        tokenizer, style = self.tokenizer, self.reasoning
        is_open = opens_reasoning(prompt, style)
        answers = conversation.continue_final or closes_reasoning(prompt, style)
        if style is None or (answers and not is_open):
            return grammar
        budget = _thinking_budget(conversation)
        if grammar is None and budget is None:
            return None
        close = tuple(tokenizer.encode(style.close, add_special=False))
        # If the prompt does not open reasoning, the model may open it or answer directly.
        opening = () if is_open else tuple(tokenizer.encode(style.open, add_special=False))
        return replace(grammar or GrammarSpec("free"), after_reasoning=close, opens_reasoning=opening, budget=budget)


def choose_tool_format(template_source: str, configured: str | None) -> str:
    """Return the configured tool-call format, else the template's, else plain JSON."""
    name = configured or choose_format(template_source) or "json"
    make_channel_parser(name)  # raises for an unknown name, with the list of formats
    return name


def answer_format(
    conversation: Conversation, tool_format: str, style: ReasoningStyle | None, reasoning_open: bool
) -> AnswerFormat:
    """Return the answer format of this conversation for a model that writes calls in `tool_format`."""
    looks_for_calls = bool(conversation.tools) and conversation.tool_choice != "none" and tool_format != "none"
    functions = [tool["function"] for tool in conversation.tools]
    return AnswerFormat(
        tool_format if looks_for_calls else None,
        style,
        reasoning_open,
        tuple(ToolSpec(f["name"], f.get("parameters") or {}, bool(f.get("strict"))) for f in functions),
        must_call=conversation.tool_choice not in ("auto", "none"),
    )


def _thinking_budget(conversation: Conversation) -> int | None:
    """Return the caller's reasoning budget, or the one in its template variables."""
    if conversation.thinking_budget is not None:
        return conversation.thinking_budget
    budget = conversation.template_kwargs.get("thinking_budget")
    return budget if isinstance(budget, int) and not isinstance(budget, bool) and budget >= 0 else None


def _for_template(message: Message) -> Message:
    """Return the message with the arguments of earlier calls as objects, which templates expect; clients send text."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if not calls:
        return message
    return {**message, "tool_calls": [_parsed_call(call) for call in calls]}


def _parsed_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (TypeError, ValueError, RecursionError):  # already an object, or not JSON
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
