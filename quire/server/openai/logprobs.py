"""Log-probabilities in the two forms of OpenAI's APIs."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.server.http.encoding import list_json
from quire.text.detokenize import Detokenizer
from quire.text.tokenizer import Tokenizer
from quire.types import TokenLogprobs

ENTRIES_AT_A_TIME = 2048
LOWEST = -9999.0  # JSON has no minus infinity


def _finite(value: float) -> float:
    return value if value > LOWEST else LOWEST


def _spelled(token_id: int, tokenizer: Tokenizer) -> str:
    """A token's text, or its bytes as OpenAI's API spells them, `bytes:\\xe2\\x82`, if it is no valid text alone."""
    own = tokenizer.token_bytes(token_id)
    try:
        return own.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


def _entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    own = tokenizer.token_bytes(token_id)
    return {"token": own.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(own)}


def chat_logprobs(tokens: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    content = []
    for token in tokens:
        top = [_entry(i, value, tokenizer) for i, value in zip(token.top_ids, token.top_logprobs, strict=True)]
        content.append({**_entry(token.token_id, token.logprob, tokenizer), "top_logprobs": top})
    return {"content": content, "refusal": None}


async def whole_chat_logprobs(tokens: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """`chat_logprobs` of a whole reply, in slices between which the event loop runs."""
    return {"content": await _entries_json(tokens, tokenizer), "refusal": None}


async def prompt_field(tokens: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """A choice's field for the prompt: one entry per token; the first token has no probability."""
    return {"prompt_logprobs": await _entries_json([None, *tokens], tokenizer)}


async def _entries_json(tokens: Sequence[TokenLogprobs | None], tokenizer: Tokenizer) -> msgspec.Raw:
    def shown(some: Sequence[TokenLogprobs | None]) -> list[Any]:
        return [None if one is None else chat_logprobs([one], tokenizer)["content"][0] for one in some]

    return await list_json(tokens, shown, _at_a_time(tokens))


def _at_a_time(tokens: Sequence[TokenLogprobs | None]) -> int:
    """The number of tokens whose entries take a few milliseconds to encode."""
    num_top = len(tokens[-1].top_ids) if tokens and tokens[-1] is not None else 0
    return max(1, ENTRIES_AT_A_TIME // (1 + num_top))


class CompletionLogprobs:
    """Parallel lists of tokens, log-probabilities and text offsets. One object per choice: offsets continue across
    chunks."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._offsets = TextOffsets(tokenizer, skip_special)

    def body(self, tokens: Sequence[TokenLogprobs | None], ids: Sequence[int]) -> dict[str, Any]:
        """The lists for parallel `tokens` and `ids`. A prompt's first token has an id and no probability."""
        texts, offsets, chosen, tops = [], [], [], []
        for token, token_id in zip(tokens, ids, strict=True):
            texts.append(_spelled(token_id, self._tokenizer))
            offsets.append(self._offsets.next(token_id))
            chosen.append(None if token is None else _finite(token.logprob))
            tops.append(None if token is None else self._top(token))
        return {"tokens": texts, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}

    async def whole_body(
        self, tokens: Sequence[TokenLogprobs | None], ids: Sequence[int], num_prompt: int
    ) -> dict[str, Any]:
        """`body` of a whole sample, in slices. `num_prompt`: tokens of an echoed prompt, whose text ends before the
        output's text begins."""
        parts: dict[str, list[Any]] = self.body([], [])
        at_a_time, begin = _at_a_time(tokens), 0
        while begin < len(tokens):
            end = min(begin + at_a_time, num_prompt if begin < num_prompt else len(tokens))
            part = self.body(tokens[begin:end], ids[begin:end])
            for name, values in parts.items():
                values += part[name]
            if end == num_prompt:
                self._offsets = TextOffsets(self._tokenizer, self._skip_special, self._offsets.finish())
            begin = end
            await asyncio.sleep(0)
        return parts

    def _top(self, token: TokenLogprobs) -> dict[str, float]:
        pairs = zip(token.top_ids, token.top_logprobs, strict=True)
        top = {_spelled(i, self._tokenizer): _finite(value) for i, value in reversed(list(pairs))}
        top.setdefault(_spelled(token.token_id, self._tokenizer), _finite(token.logprob))
        return top


class TextOffsets:
    """The character offset at which each token begins. Tokens that share a character begin at it; a token without text
    begins at the next token's offset."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, start: int = 0):
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._detokenizer = Detokenizer(tokenizer, skip_special)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = start

    def next(self, token_id: int) -> int:
        is_shown = bool(self._tokenizer.shown_ids((token_id,), self._skip_special))
        own = self._tokenizer.token_bytes(token_id) if is_shown else b""
        unfinished, _ = self._utf8.getstate()
        # An incomplete character that this token does not continue is one U+FFFD before the token.
        is_broken = bool(unfinished and own) and not 0x80 <= own[0] < 0xC0
        offset = self._num_chars + is_broken
        self._num_chars += len(self._detokenizer.push((token_id,)))
        self._utf8.decode(own)
        return offset

    def finish(self) -> int:
        """The text's length in characters."""
        self._num_chars += len(self._detokenizer.finish())
        return self._num_chars
