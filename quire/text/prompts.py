"""Encodes prompts within bounds: text that can't fit is refused early, and message content never becomes control
tokens.

`encode_within` stops encoding a text that can't fit the context. `render_chat` renders a conversation so that a control
token spelled inside a message stays text; `encode_chat` encodes the result. Called by the edge and by chat turns.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.types import PromptTooLong

SLICE_CHARS = 1 << 18  # longer text is first counted in slices, so that encoding stops once it can't fit
CUT_TOKENS = 64  # a slice cut inside a word may have this many tokens more than its part of the whole text
_ANCHOR = "\n"  # no vocabulary merges a line break with the following text

Message = dict[str, Any]


def encode_within(tokenizer: Tokenizer, text: str, limit: int, *, add_special: bool = True) -> list[int]:
    """The token ids of `text`. Raises `prompt_too_long` as soon as a prefix can't fit, so that the cost is bounded by
    the limit and not by the text."""
    if len(text) > SLICE_CHARS:
        _check_long(tokenizer, text, limit)
    ids = tokenizer.encode(text, add_special=add_special)
    if len(ids) > limit:
        raise PromptTooLong(len(ids), limit)
    return ids


def _check_long(tokenizer: Tokenizer, text: str, limit: int) -> None:
    fewest = len(text) // tokenizer.longest_token  # a lower bound that needs no encoding
    if fewest > limit:
        raise PromptTooLong(fewest, limit, at_least=True)
    count = 0
    for begin in range(0, len(text), SLICE_CHARS):
        count += max(0, len(tokenizer.encode(text[begin : begin + SLICE_CHARS], add_special=False)) - CUT_TOKENS)
        if count > limit:
            raise PromptTooLong(count, limit, at_least=True)


def render_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: list[Message],
    *,
    special_in_content: bool = False,
    tools: list[dict[str, Any]] | None = None,
    **variables: Any,
) -> list[str]:
    """The prompt's text in segments, which joined are the whole text. No special token spans two segments.

    A control token spelled in a message, a tool or a variable is cut inside its spelling, so that it is encoded as
    text. There are no other cuts, so other conversations have one segment. `special_in_content` makes no cuts."""
    if special_in_content:
        return [template.render(messages, tools=tools, **variables)]
    cutter = _Cutter(tokenizer)
    cut_messages = [cutter.cut_message(message) if isinstance(message, dict) else message for message in messages]
    text = template.render(cut_messages, tools=cutter.cut(tools), **cutter.cut(variables))
    return text.split(cutter.mark) if cutter.has_cut else [text]


def encode_chat(tokenizer: Tokenizer, segments: list[str], limit: int) -> list[int]:
    """The token ids of a rendered conversation, at most `limit`. BOS is not added: templates write it themselves."""
    ids = encode_within(tokenizer, segments[0], limit, add_special=False)
    anchor = tokenizer.encode(_ANCHOR, add_special=False) if len(segments) > 1 else []
    for segment in segments[1:]:
        try:
            ids.extend(_encode_inside(tokenizer, segment, anchor, limit))  # in place: there may be many segments
        except PromptTooLong as error:  # its count is of this segment and the anchor only
            raise PromptTooLong(max(limit + 1, error.count - 1), limit, at_least=True) from None
        if len(ids) > limit:
            raise PromptTooLong(len(ids), limit, at_least=True)
    return ids


def _encode_inside(tokenizer: Tokenizer, text: str, anchor: list[int], limit: int) -> list[int]:
    """The ids of text that follows other text, without the space that the tokenizer puts before a text. `anchor`: the
    ids of `_ANCHOR`."""
    ids = encode_within(tokenizer, _ANCHOR + text, limit + len(anchor), add_special=False)
    if ids[: len(anchor)] == anchor:
        return ids[len(anchor) :]
    return encode_within(tokenizer, text, limit, add_special=False)


class _Cutter:
    """Inserts a mark inside every spelling of a control token. The mark is random digits, which no message can predict
    and which templates, JSON encoding and upper-casing leave unchanged."""

    def __init__(self, tokenizer: Tokenizer):
        self.mark = f"{secrets.randbits(128):039d}"
        self.has_cut = False
        self._special = tokenizer.special_spellings
        self._ends = tuple(text for text in tokenizer.turn_spellings if text in self._special)

    def cut_message(self, message: Message) -> Message:
        """Cut one message. In an assistant's message, which the model wrote, markers of tool calls and reasoning keep
        their meaning; only tokens that begin a text or end the turn are cut."""
        spellings = self._ends if message.get("role") == "assistant" else self._special
        return {name: value if name == "role" else self.cut(value, spellings) for name, value in message.items()}

    def cut(self, value: Any, spellings: tuple[str, ...] | None = None) -> Any:
        spellings = self._special if spellings is None else spellings
        if isinstance(value, str):
            return self._cut_text(value, spellings)
        if isinstance(value, Mapping):
            return {self.cut(name, spellings): self.cut(inner, spellings) for name, inner in value.items()}
        if isinstance(value, list):
            return self._cut_parts([self.cut(inner, spellings) for inner in value], spellings)
        return value

    def _cut_text(self, text: str, spellings: tuple[str, ...]) -> str:
        for spelling in spellings:
            if spelling in text:
                self.has_cut = True
                text = text.replace(spelling, spelling[0] + self.mark + spelling[1:])
        return text

    def _cut_parts(self, parts: list[Any], spellings: tuple[str, ...]) -> list[Any]:
        """Mark the joints of text parts: templates may concatenate them, and two halves must not form a control
        token."""
        texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
        joined = "".join(texts)
        if len(texts) < 2 or not any(spelling in joined for spelling in spellings):
            return parts
        self.has_cut = True
        first = True
        cut: list[Any] = []
        for part in parts:
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                part, first = (part if first else {**part, "text": self.mark + part["text"]}), False
            cut.append(part)
        return cut
