"""Resolves the words in sampling parameters to token ids, because the engine has no tokenizer.

The front ends call `resolve_params` once per request. Parameters without words are returned unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.text.tokenizer import Tokenizer
from quire.types import QuireError, SamplingParams

MAX_BAD_WORD_TOKENS = 1 << 16  # of all words of a request together


def resolve_params(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Fill `prediction_ids` from `prediction`, `bad_token_ids` from `bad_words` and, if DRY is on, `dry_breaker_ids`
    from `dry_breakers`."""
    changes: dict[str, Any] = {}
    if params.prediction:
        changes["prediction_ids"] = tuple(tokenizer.encode(params.prediction, add_special=False))
        changes["prediction"] = None
    if params.bad_words:
        found = find_bad_words(params.bad_words, tokenizer)
        changes["bad_token_ids"] = tuple(dict.fromkeys([*params.bad_token_ids, *found]))
    if params.dry_multiplier > 0 and params.dry_breakers:
        ids = {token_id for breaker in params.dry_breakers for token_id in tokenizer.ids_containing(breaker)}
        changes["dry_breaker_ids"] = tuple(sorted(ids.union(params.dry_breaker_ids)))
    return replace(params, **changes) if changes else params


def prediction_too_long(count: int, limit: int) -> QuireError:
    """Return the error of a prediction of `count` tokens, or at least so many, where the context has room for fewer."""
    what = f"The prediction has {count} tokens or more, the model's limit is {limit} for prompt and output."
    return QuireError("invalid_parameter", what, "Predict only the text that the answer will hold.", "prediction")


def find_bad_words(words: Sequence[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return the token sequences of all words, each once. Refuses words that come to too many tokens: each sample of
    the request carries them all, through the event loop and to the engine."""
    found: dict[tuple[int, ...], None] = {}
    num_tokens = 0
    for word in words:
        for ids in bad_word_ids(word, tokenizer):
            if ids not in found:
                found[ids] = None
                num_tokens += len(ids)
        if num_tokens > MAX_BAD_WORD_TOKENS:
            what = f"bad_words come to more than {MAX_BAD_WORD_TOKENS} tokens."
            raise QuireError("invalid_parameter", what, "Send fewer or shorter words.", "bad_words")
    return list(found)


def bad_word_ids(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The token sequences of the word after a space and without one.

    Only the tokenizer's canonical spelling is covered; a model may still spell the word in other tokens.
    """
    bare = word.lstrip(" ") or word
    ways = (tuple(tokenizer.encode_inside(bare)), tuple(tokenizer.encode_inside(" " + bare)))
    return [ids for ids in dict.fromkeys(ways) if ids]
