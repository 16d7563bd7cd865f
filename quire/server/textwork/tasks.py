"""The tasks of a text worker, their results, and `TextTasks`, which runs them.

Tasks and results are typed and cross the process boundary as msgpack. A task refused because of the client's input
gives a `TaskRefusal`, from which `raise_refusal` raises the error in the HTTP process.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import countOf
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from quire.config import Config
from quire.files.source import ModelFiles
from quire.server.http.errors import ApiError
from quire.text.channels.structural import structural_grammar
from quire.text.conversation import ChatRenderer, Conversation, ConversationLimits
from quire.text.loading import load_tokenizer
from quire.text.prompts import encode_within
from quire.text.resolve import find_bad_words
from quire.text.schema import with_schema_warnings
from quire.text.template import template_for
from quire.text.tokenizer import Tokenizer
from quire.types import GrammarSpec, PromptTooLong, QuireError

MAX_NODES = 50_000  # JSON values in one body, excluding token ids


class Setup(msgspec.Struct, frozen=True):
    """The model and the settings that a worker needs."""

    kind: str
    path: str
    chat_template: str | None
    tool_format: str | None  # None: read from the template
    max_messages: int
    max_tools: int
    max_schema: int
    special_in_content: bool
    lenient: bool = False
    seconds: float = 5.0  # processor time per task; large tasks get more
    memory: int = 1 << 30  # bytes a worker may add after its setup

    @classmethod
    def of(cls, config: Config, files: ModelFiles) -> Setup:
        server, model = config.server, config.model
        return cls(
            files.kind,
            str(files.path),
            model.chat_template,
            server.tool_format,
            server.max_messages,
            server.max_tools,
            server.max_schema,
            model.special_in_content,
            server.lenient,
        )

    @property
    def files(self) -> ModelFiles:
        return ModelFiles("gguf" if self.kind == "gguf" else "folder", Path(self.path), "", None)

    @property
    def limits(self) -> ConversationLimits:
        return ConversationLimits(self.max_messages, self.max_tools, self.max_schema)


class RenderChat(msgspec.Struct, tag=True, frozen=True):
    conversation: Conversation
    max_tokens: int
    with_text: bool = False


class EncodeText(msgspec.Struct, tag=True, frozen=True):
    text: str
    max_tokens: int
    add_special: bool = True


class DecodeTokens(msgspec.Struct, tag=True, frozen=True):
    ids: bytes  # int32 each
    skip_special: bool


class FindWords(msgspec.Struct, tag=True, frozen=True):
    bad_words: tuple[str, ...]
    dry_breakers: tuple[str, ...]


class CheckBody(msgspec.Struct, tag=True, frozen=True):
    path: str
    body: bytes
    max_prompt: int  # tokens


class CheckOutput(msgspec.Struct, tag=True, frozen=True):
    grammar: GrammarSpec
    param: str


class Rendered(msgspec.Struct, tag=True, frozen=True):
    text: str
    ids: bytes
    grammar: GrammarSpec | None
    grammar_param: str
    reasoning_open: bool
    show_special: bool


class EncodedText(msgspec.Struct, tag="Encoded", frozen=True):
    ids: bytes


class DecodedText(msgspec.Struct, tag="Decoded", frozen=True):
    text: str


class FoundWords(msgspec.Struct, tag=True, frozen=True):
    bad_token_ids: tuple[tuple[int, ...], ...]
    dry_breaker_ids: tuple[int, ...]


class CheckedBody(msgspec.Struct, tag=True, frozen=True):
    packed: bytes  # written by `pack_body`


class OutputFits(msgspec.Struct, tag=True, frozen=True):
    grammar: GrammarSpec


class TaskRefusal(msgspec.Struct, tag="Refused", frozen=True):
    code: str
    what: str
    hint: str | None = None
    param: str | None = None
    status: int = 0  # HTTP status of an ApiError; 0 for a QuireError
    counts: tuple[int, int, bool] | None = None  # count, limit, at_least of a PromptTooLong


Task = RenderChat | EncodeText | DecodeTokens | FindWords | CheckBody | CheckOutput
Result = Rendered | EncodedText | DecodedText | FoundWords | CheckedBody | OutputFits | TaskRefusal


def pack_ids(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    ids = array("i")
    ids.frombytes(packed)
    return ids.tolist()


def raise_refusal(refused: TaskRefusal) -> NoReturn:
    if refused.status:
        raise ApiError(refused.status, refused.code, refused.what, refused.param)
    if refused.counts is not None:
        count, limit, at_least = refused.counts
        raise PromptTooLong(count, limit, at_least=at_least)
    raise QuireError(refused.code, refused.what, refused.hint or "", refused.param)


@dataclass
class TextTasks:
    """Runs tasks one at a time in the current process."""

    setup: Setup
    tokenizer: Tokenizer

    @classmethod
    def load(cls, setup: Setup) -> TextTasks:
        tokenizer = load_tokenizer(setup.files)
        if tokenizer is None:
            raise QuireError("no_tokenizer", "This model has no tokenizer.")
        return cls(setup, tokenizer)

    def run(self, task: Task) -> Result:
        try:
            return self._run(task)
        except ApiError as error:
            return TaskRefusal(error.code, error.message, None, error.param, error.status)
        except PromptTooLong as error:
            return TaskRefusal(error.code, error.what, counts=(error.count, error.limit, error.at_least))
        except QuireError as error:
            return TaskRefusal(error.code, error.what, error.hint, error.param)

    def _run(self, task: Task) -> Result:
        match task:
            case RenderChat(conversation, max_tokens, with_text):
                made = self.renderer.render(conversation, max_tokens)
                return Rendered(
                    made.text if with_text else "",
                    pack_ids(made.tokens),
                    made.grammar,
                    made.grammar_param,
                    made.format.reasoning_open,
                    made.show_special,
                )
            case EncodeText(text, max_tokens, add_special):
                return EncodedText(pack_ids(encode_within(self.tokenizer, text, max_tokens, add_special=add_special)))
            case DecodeTokens(ids, skip_special):
                return DecodedText(self.tokenizer.decode(unpack_ids(ids), skip_special=skip_special))
            case FindWords(bad_words, dry_breakers):
                bad = find_bad_words(bad_words, self.tokenizer)
                breakers = {i for text in dry_breakers for i in self.tokenizer.ids_containing(text)}
                return FoundWords(tuple(bad), tuple(sorted(breakers)))
            case CheckBody(path, body, max_prompt):
                return CheckedBody(check_body(path, body, max_prompt, lenient=self.setup.lenient))
            case CheckOutput(grammar, param):
                if grammar.kind == "structural_tag":
                    return OutputFits(structural_grammar(grammar, self.tokenizer, param))
                return OutputFits(with_schema_warnings(grammar, param))

    @cached_property
    def renderer(self) -> ChatRenderer:
        setup = self.setup
        return ChatRenderer.from_template(
            self.tokenizer,
            template_for(self.tokenizer, setup.chat_template),
            tool_format=setup.tool_format,
            limits=setup.limits,
            special_in_content=setup.special_in_content,
        )


def check_body(path: str, body: bytes, max_prompt: int, *, lenient: bool = False) -> bytes:
    """The validated and packed body. Raises the error that the HTTP process answers with. Validation here keeps bodies
    that are expensive in memory or time out of the HTTP process."""
    from quire.server.http.bodies import decode_json, known_fields, pack_body, validate_body

    try:
        value = decode_json(body)
    except json.JSONDecodeError as error:
        raise ApiError(400, "invalid_json", f"The body is not valid JSON: {error.msg}.") from None
    if _num_nodes(value, MAX_NODES) > MAX_NODES:
        raise ApiError(400, "body_too_complex", f"The body holds more than {MAX_NODES} JSON values.")
    if lenient:
        value, _ = known_fields(path, value)
    validate_body(path, value)
    for prompt in _token_prompts(path, value):
        if len(prompt) > max_prompt:
            raise PromptTooLong(len(prompt), max_prompt)
    return pack_body(value)


def _token_prompts(path: str, value: Any) -> Iterator[list[int]]:
    """The prompts of a validated body that are token ids."""
    given = value.get({"/v1/completions": "prompt", "/v1/embeddings": "input"}.get(path, "")) if value else None
    if isinstance(given, list) and given:
        yield from ([given] if isinstance(given[0], int) else (one for one in given if isinstance(one, list)))


def _num_nodes(value: Any, limit: int) -> int:
    """The number of values in a decoded body, up to `limit`. A list of token ids counts as one value."""
    count, stack = 0, [value]
    while stack and count <= limit:
        value = stack.pop()
        count += 1
        if isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, list) and countOf(map(type, value), int) != len(value):
            stack.extend(value)
    return count
