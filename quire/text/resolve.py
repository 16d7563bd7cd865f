"""Turns the words in sampling parameters into token ids, at the edge, where the tokenizer is.

The front ends call `resolve_params` once per request; beyond it the engine knows ids only. Parameters that ask for
nothing of the kind pass through untouched and cost nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.text.tokenizer import Tokenizer
from quire.types import SamplingParams


def resolve_params(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Fill `bad_token_ids` from `bad_words` and, if DRY is on, `dry_breaker_ids` from `dry_breakers`."""
    changes: dict[str, Any] = {}
    if params.bad_words:
        found = [ids for word in params.bad_words for ids in bad_word_ids(word, tokenizer)]
        changes["bad_token_ids"] = tuple(dict.fromkeys([*params.bad_token_ids, *found]))
    if params.dry_multiplier > 0 and params.dry_breakers:
        ids = {token_id for breaker in params.dry_breakers for token_id in tokenizer.ids_containing(breaker)}
        changes["dry_breaker_ids"] = tuple(sorted(ids.union(params.dry_breaker_ids)))
    return replace(params, **changes) if changes else params


def bad_word_ids(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """How the word is written in tokens where it follows a space, and where it does not.

    Only the tokenizer's own way of writing it is found; a model that spells the word in odd pieces gets around it.
    """
    bare = word.lstrip(" ") or word
    ways = (tuple(tokenizer.encode_inside(bare)), tuple(tokenizer.encode_inside(" " + bare)))
    return [ids for ids in dict.fromkeys(ways) if ids]
