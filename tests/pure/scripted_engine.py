"""An engine that plays a transcript: each question is answered by the next prepared answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quire.agent.engines.seam import AnswerStream, ModelAnswer, ModelCall, Question, ReasoningPiece, TextPiece

Prepared = str | ModelAnswer | BaseException | Callable[[Question], "str | ModelAnswer"]


def calling(*calls: tuple[str, dict[str, Any]], text: str = "", ids: str = "c") -> ModelAnswer:
    """An answer with calls."""
    made = [ModelCall(name, json.dumps(arguments), f"{ids}{index}") for index, (name, arguments) in enumerate(calls)]
    return ModelAnswer(text, calls=made, finish_reason="stop")


@dataclass
class ScriptedEngine:
    """Implements `ChatEngine`. Tokens are words. An exception is raised after half of the next answer's text."""

    answers: list[Prepared]
    name: str = "scripted"
    context_len: int | None = 100_000
    takes_tools: bool = True
    asked: list[Question] = field(default_factory=list)
    kept: list[Question] = field(default_factory=list)
    can_count: bool = True
    known: int = 0  # tokens of the last prompt and answer, as a prefix cache would hold them

    def ask(self, question: Question) -> AnswerStream:
        self.asked.append(question)
        prepared = self.answers.pop(0)
        if callable(prepared) and not isinstance(prepared, BaseException):
            prepared = prepared(question)
        if isinstance(prepared, BaseException):
            yield TextPiece("half an ans")
            raise prepared
        answer = ModelAnswer(prepared) if isinstance(prepared, str) else prepared
        if answer.reasoning:
            yield ReasoningPiece(answer.reasoning)
        for start in range(0, len(answer.content), 7):
            yield TextPiece(answer.content[start : start + 7])
        answer.prompt_tokens = count_words(question)
        answer.output_tokens = len(answer.content.split()) + 5 * len(answer.calls)
        answer.cached_tokens = min(self.known, answer.prompt_tokens)
        self.known = answer.prompt_tokens
        answer.seconds = 0.5
        return answer

    def count(self, question: Question) -> int | None:
        return count_words(question) if self.can_count else None

    def keep(self, question: Question) -> None:
        self.kept.append(question)

    def models(self) -> list[str]:
        return [self.name]

    def switch(self, name: str) -> None:
        self.name = name

    def close(self) -> None:
        pass


def count_words(question: Question) -> int:
    return sum(
        len(str(message.get("content") or "").split()) + len(str(message.get("tool_calls") or "").split())
        for message in question.messages
    )
