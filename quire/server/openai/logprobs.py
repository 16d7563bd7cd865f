"""Log-probabilities in the two forms OpenAI's APIs have for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.text.tokenizer import Tokenizer
from quire.types import TokenLogprobs

LOWEST = -9999.0  # JSON has no minus infinity


def _finite(value: float) -> float:
    return value if value > LOWEST else LOWEST


def _shown(token_id: int, tokenizer: Tokenizer) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


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

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._offset = 0

    def body(self, tokens: Sequence[TokenLogprobs | None], ids: Sequence[int]) -> dict[str, Any]:
        """`tokens` and `ids` side by side; the first token of a prompt has an id but no probability."""
        texts, offsets, chosen, tops = [], [], [], []
        for token, token_id in zip(tokens, ids, strict=True):
            text = _shown(token_id, self._tokenizer)
            texts.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
            chosen.append(None if token is None else _finite(token.logprob))
            tops.append(None if token is None else self._top(token))
        return {"tokens": texts, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, token: TokenLogprobs) -> dict[str, float]:
        pairs = zip(token.top_ids, token.top_logprobs, strict=True)
        top = {_shown(i, self._tokenizer): _finite(value) for i, value in reversed(list(pairs))}
        top.setdefault(_shown(token.token_id, self._tokenizer), _finite(token.logprob))
        return top
