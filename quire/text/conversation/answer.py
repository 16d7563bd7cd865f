"""The model's answer in a chat turn: parses generated text into content, reasoning and tool calls."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from quire.text.channels import (
    AnswerMarkers,
    ChannelParser,
    Event,
    ReasoningDelta,
    ReasoningStyle,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolFormat,
    ToolSpec,
    make_channel_parser,
)


@dataclass(slots=True)
class ToolCall:
    """One call of a tool in an answer."""

    name: str
    id: str
    arguments: str = ""  # JSON text
    is_complete: bool = False  # false: the output ended inside the arguments


@dataclass(slots=True)
class AssistantMessage:
    """The parts of one answer. `add` collects the events of a channel parser."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, TextDelta):
                self.content += event.text
            elif isinstance(event, ReasoningDelta):
                self.reasoning += event.text
            elif isinstance(event, ToolCallStart):
                self.tool_calls.append(ToolCall(event.name, f"call_{secrets.token_hex(12)}"))
            elif isinstance(event, ToolCallDelta):
                self.tool_calls[event.index].arguments += event.arguments
            elif isinstance(event, ToolCallEnd):
                self.tool_calls[event.index].is_complete = event.is_whole

    def as_message(self) -> dict[str, Any]:
        """Return the message to append to a conversation before the tools' results, in OpenAI's form."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The formats of tool calls and reasoning in one turn's answer, known before the first token is sampled."""

    tool_format: ToolFormat | None  # None: text that looks like a call stays text
    reasoning: ReasoningStyle | None
    answer: AnswerMarkers
    reasoning_open: bool  # the prompt ends inside reasoning
    tools: tuple[ToolSpec, ...] = ()
    must_call: bool = False  # a grammar restricts the answer to calls

    def make_parser(self) -> ChannelParser:
        return make_channel_parser(
            self.tool_format,
            reasoning=self.reasoning or False,
            answer=self.answer,
            reasoning_open=self.reasoning_open,
            tools=self.tools,
            must_call=self.must_call,
        )

    def parse(self, text: str, *, cut: bool) -> AssistantMessage:
        """Parse a complete answer. `cut`: it ended at the token limit or at a stop string."""
        parser, message = self.make_parser(), AssistantMessage()
        message.add(parser.push(text))
        message.add(parser.finish(cut=cut))
        return message
