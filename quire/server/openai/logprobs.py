"""Log-probabilities in the two forms OpenAI's APIs have for them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from quire.text.detokenize import Detokenizer
from quire.text.tokenizer import Tokenizer
from quire.types import TokenLogprobs

LOWEST = -9999.0  # JSON has no minus infinity


def _finite(value: float) -> float:
    return value if value > LOWEST else LOWEST


def _spelled(token_id: int, tokenizer: Tokenizer) -> str:
    """A token's text; of one that is no text by itself its bytes, as OpenAI's API spells them: `bytes:\\xe2\\x82`."""
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


def prompt_field(tokens: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """A choice's field for the prompt: one entry per token, the first of which has no probability."""
    return {"prompt_logprobs": [None, *chat_logprobs(tokens, tokenizer)["content"]]}


class CompletionLogprobs:
    """Lists side by side, and where each token's text begins. One per choice: the offsets go on from chunk to chunk."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._offsets = TextOffsets(tokenizer, skip_special)

    def body(
        self, tokens: Sequence[TokenLogprobs | None], ids: Sequence[int], *, num_prompt: int = 0
    ) -> dict[str, Any]:
        """`tokens` and `ids` side by side; the first token of a prompt has an id but no probability. `num_prompt`: how
        many of them are an echoed prompt, whose text ends before that of the output begins."""
        texts, offsets, chosen, tops = [], [], [], []
        for place, (token, token_id) in enumerate(zip(tokens, ids, strict=True)):
            if place == num_prompt > 0:
                self._offsets = TextOffsets(self._tokenizer, self._skip_special, self._offsets.finish())
            texts.append(_spelled(token_id, self._tokenizer))
            offsets.append(self._offsets.next(token_id))
            chosen.append(None if token is None else _finite(token.logprob))
            tops.append(None if token is None else self._top(token))
        return {"tokens": texts, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, token: TokenLogprobs) -> dict[str, float]:
        pairs = zip(token.top_ids, token.top_logprobs, strict=True)
        top = {_spelled(i, self._tokenizer): _finite(value) for i, value in reversed(list(pairs))}
        top.setdefault(_spelled(token.token_id, self._tokenizer), _finite(token.logprob))
        return top


class TextOffsets:
    """The character of a text at which each of its tokens begins. All tokens that share a character begin at it; a
    token that is not shown begins where the next one does."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, start: int = 0):
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._detokenizer = Detokenizer(tokenizer, skip_special)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = start

    def next(self, token_id: int) -> int:
        is_shown = bool(self._tokenizer.shown_ids((token_id,), self._skip_special))
        own = self._tokenizer.token_bytes(token_id) if is_shown else b""
        unfinished, _ = self._utf8.getstate()
        # A character that this token does not continue stays unfinished: it is shown as one U+FFFD before the token.
        is_broken = bool(unfinished and own) and not 0x80 <= own[0] < 0xC0
        offset = self._num_chars + is_broken
        self._num_chars += len(self._detokenizer.push((token_id,)))
        self._utf8.decode(own)
        return offset

    def finish(self) -> int:
        """How many characters the text has."""
        self._num_chars += len(self._detokenizer.finish())
        return self._num_chars
