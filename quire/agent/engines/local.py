"""A model in this process, through `quire.LLM`'s public methods."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, Protocol

from quire.agent.engines.seam import AnswerStream, ModelAnswer, ModelCall, Question, ReasoningPiece, TextPiece
from quire.edge import Chunk, Edge, Output
from quire.text.channels import Event, ReasoningDelta, TextDelta
from quire.text.conversation import AssistantMessage, ChatTurn
from quire.text.schema.normal import normalise
from quire.types import QuireError, SamplingParams


class InProcessModel(Protocol):
    """What the agent uses of `quire.LLM`."""

    @property
    def edge(self) -> Edge: ...

    def stream(self, prompt: Any, params: SamplingParams | None = None) -> Generator[Chunk, None, None]: ...

    def pin(self, prompt: Any, *, pinned: bool = True) -> int: ...


class LocalEngine:
    """Implements `ChatEngine`. The caller closes the `LLM`."""

    def __init__(self, llm: InProcessModel, name: str, params: SamplingParams | None = None) -> None:
        self.name = name
        self._llm, self._params = llm, params or SamplingParams()
        self.context_len: int | None = llm.edge.max_len
        self.takes_tools = "tools" in llm.edge.template().source
        self._pinned: list[int] | None = None

    def ask(self, question: Question) -> AnswerStream:
        turn, params = self._turn(question)
        parser, message = turn.make_parser(), AssistantMessage()
        output: Output | None = None
        started = time.monotonic()
        with closing(self._llm.stream(turn.tokens, turn.fit(params))) as chunks:
            for chunk in chunks:
                output = chunk.output or output
                events = parser.push(chunk.text)
                message.add(events)
                yield from _pieces(events)
        if output is None:
            raise QuireError("no_answer", "The engine ended the request without a result.")
        if output.finish_reason == "error":
            raise QuireError(output.error_code or "request_failed", output.error or "The request failed.")
        events = parser.finish(cut=output.finish_reason != "stop")
        message.add(events)
        yield from _pieces(events)
        return _answer(message, output, time.monotonic() - started)

    def count(self, question: Question) -> int | None:
        turn, _ = self._turn(question)
        return len(turn.tokens)

    def keep(self, question: Question) -> None:
        turn, _ = self._turn(question)
        with suppress(QuireError):
            if self._pinned is not None:
                self._llm.pin(self._pinned, pinned=False)
                self._pinned = None
            if self._llm.pin(turn.tokens):
                self._pinned = turn.tokens

    def models(self) -> list[str]:
        return [self.name]

    def switch(self, name: str) -> None:
        if name != self.name:
            what = f"This process has loaded {self.name} alone."
            raise QuireError("unknown_model", what, "Start again with the other model and --continue.")

    def close(self) -> None:
        if self._pinned is not None:
            with suppress(QuireError):
                self._llm.pin(self._pinned, pinned=False)
            self._pinned = None

    def _turn(self, question: Question) -> tuple[ChatTurn, SamplingParams]:
        params = replace(self._params, **question.sampling)
        tools = [_strictly(tool) for tool in question.tools] if question.strict else question.tools
        choice = question.tool_choice if question.tools else "auto"
        turn = self._llm.edge.chat_turn(
            question.messages, params, tools=tools or None, tool_choice=choice, parallel_tools=not question.is_pinned
        )
        return turn, params


def _strictly(tool: dict[str, Any]) -> dict[str, Any]:
    """Returns the tool as strict, unless its schema has keywords that no grammar can enforce; MCP servers have such."""
    try:
        normalise(tool["function"].get("parameters") or {}, strict=True)
    except QuireError:
        return tool
    return {**tool, "function": {**tool["function"], "strict": True}}


def _pieces(events: list[Event]) -> Generator[TextPiece | ReasoningPiece, None, None]:
    for event in events:
        if isinstance(event, TextDelta):
            yield TextPiece(event.text)
        elif isinstance(event, ReasoningDelta):
            yield ReasoningPiece(event.text)


def _answer(message: AssistantMessage, output: Output, seconds: float) -> ModelAnswer:
    calls = [ModelCall(call.name, call.arguments, call.id, call.is_complete) for call in message.tool_calls]
    usage = output.usage
    return ModelAnswer(
        message.content,
        message.reasoning,
        calls,
        output.finish_reason,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
        output.timing.first_token,
        seconds,
    )
