"""A stand-in for `quire.LLM` that speaks prepared answers: tokens are words, nothing is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from quire.config import Config
from quire.types import QuireError, SamplingParams, Timing, Usage


@dataclass
class Output:
    text: str
    token_ids: list[int]
    finish_reason: str
    usage: Usage
    timing: Timing
    error: str | None = None
    error_code: str | None = None


@dataclass
class Chunk:
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    output: Output | None = None


class WordTokenizer:
    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [len(word) for word in text.split()]


@dataclass
class FakeEdge:
    max_len: int
    tokenizer: WordTokenizer

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.tokenizer.encode(" ".join(message["content"] for message in messages))


@dataclass
class FakeLLM:
    """Each answer is a list of texts; an exception is raised in its place, an output ends the answer with it."""

    answers: list[list[Any]]
    max_model_len: int = 1000
    config: Config = field(default_factory=Config)
    asked: list[Any] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    num_ended_early: int = 0
    is_closed: bool = False
    tokenizer: WordTokenizer = field(default_factory=WordTokenizer)

    @property
    def edge(self) -> FakeEdge:
        return FakeEdge(self.max_model_len, self.tokenizer)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    def stream(self, prompt: Any, params: SamplingParams | None = None) -> Iterator[Chunk]:
        texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
        prompt_len = sum(len(text.split()) for text in texts)
        if prompt_len >= self.max_model_len:
            raise QuireError("prompt_too_long", f"{prompt_len} tokens do not fit.")
        self.asked.append(prompt)
        self.params.append(params or SamplingParams())
        return self._speak(self.answers.pop(0), prompt_len)

    def _speak(self, pieces: list[Any], prompt_len: int) -> Iterator[Chunk]:
        said = ""
        try:
            for piece in pieces:
                if isinstance(piece, BaseException):
                    raise piece
                if isinstance(piece, Output):
                    yield Chunk("", [], piece.finish_reason, piece)
                    return
                said += piece
                yield Chunk(piece, self.tokenizer.encode(piece))
        except BaseException:
            self.num_ended_early += 1
            raise
        ids = self.tokenizer.encode(said)
        usage = Usage(prompt_tokens=prompt_len, completion_tokens=len(ids))
        output = Output(said, ids, "stop", usage, Timing(queue=0.0, first_token=0.25, total=1.25))
        yield Chunk("", [], "stop", output)
