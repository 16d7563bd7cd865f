"""Prompts for a gap between two texts, for `suffix` of `/v1/completions` and for `/infill`."""

from __future__ import annotations

from dataclasses import replace

from quire.server.chat import ChatPrompts
from quire.text.infill import find_infill
from quire.text.tokenizer import Tokenizer
from quire.types import MAX_STOPS, SamplingParams


async def infill_prompt(chat: ChatPrompts, tokenizer: Tokenizer, before: str, after: str) -> list[int]:
    """The prompt's tokens. Raises for a model that can't fill gaps; the engine's edge refuses what is too long."""
    tokens = find_infill(tokenizer)
    first = tokenizer.encode("a")[:1]
    start = first if first == [tokenizer.bos_id] else []
    return [
        *start,
        *tokens.join(
            await chat.tokenize(before, add_special=False) if before else [],
            await chat.tokenize(after, add_special=False) if after else [],
        ),
    ]


def ended_infill(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """The parameters with the tokens that end a filled gap."""
    stops = tuple(dict.fromkeys((*params.stop_token_ids, *find_infill(tokenizer).ends)))[:MAX_STOPS]
    return params if params.ignore_eos else replace(params, stop_token_ids=stops)
