"""The contract between the agent and an engine: a question goes in, pieces of text and one answer come out."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

ChatMessage = dict[str, Any]  # OpenAI's form


@dataclass(frozen=True, slots=True)
class Question:
    """One request to a model."""

    messages: list[ChatMessage]
    tools: list[dict[str, Any]] = field(default_factory=list)  # OpenAI's form
    tool_choice: str = "auto"  # auto, none, required, or a tool's name
    strict: bool = True  # a grammar keeps calls well-formed where the engine has one
    sampling: Mapping[str, Any] = field(default_factory=dict)  # names of SamplingParams

    @property
    def is_pinned(self) -> bool:
        """Whether one tool is named: then one call is wanted, and a small model may repeat it without end."""
        return self.tool_choice not in ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class TextPiece:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    text: str


@dataclass(slots=True)
class ModelCall:
    """One call as the model wrote it."""

    name: str
    arguments: str  # JSON text, perhaps malformed
    id: str
    is_complete: bool = True


@dataclass(slots=True)
class ModelAnswer:
    """The whole of one answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[ModelCall] = field(default_factory=list)
    finish_reason: str = "stop"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        spent = self.seconds - self.first_token_seconds
        return (self.output_tokens - 1) / spent if self.output_tokens > 1 and spent > 0 else 0.0


AnswerStream = Generator[TextPiece | ReasoningPiece, None, ModelAnswer]


class ChatEngine(Protocol):
    """A model that answers conversations. Used by one thread at a time."""

    name: str
    context_len: int | None  # tokens of prompt and answer together; None: unknown
    takes_tools: bool  # its chat template describes tools to the model

    def ask(self, question: Question) -> AnswerStream:
        """Streams an answer and returns the whole of it. Closing the stream cancels the request."""
        ...

    def count(self, question: Question) -> int | None:
        """Returns the tokens of the prompt; None if the engine can't tell beforehand."""
        ...

    def keep(self, question: Question) -> None:
        """Pins the question's cached prefix in place of the one pinned before, where the engine can."""
        ...

    def models(self) -> list[str]:
        """Returns the names that `switch` takes."""
        ...

    def switch(self, name: str) -> None:
        """Asks another model from now on. Raises `QuireError` if the engine has no such model."""
        ...

    def close(self) -> None: ...
