"""Completions' lists of tokens: where each one's text begins, and how a token that is no text by itself is spelled."""

from __future__ import annotations

import asyncio
import random

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("fastapi")

from quire.server.openai.logprobs import CompletionLogprobs, TextOffsets
from quire.text.tokenizer import Tokenizer
from quire.types import TokenLogprobs
from tests.pure.test_server_sample import ids, tokenizer

SPECIAL_STYLES = next(i for i in range(tokenizer().vocab_size) if tokenizer().is_special(i))


def offsets(tokens: list[int], skip_special: bool = True) -> list[int]:
    found = TextOffsets(tokenizer(), skip_special)
    return [found.next(token) for token in tokens]


def test_all_tokens_of_a_character_begin_at_it() -> None:
    assert offsets(ids("aé😀b")) == [0, 1, 1, 2, 2, 2, 2, 3]


def test_a_character_that_stays_unfinished_takes_one_place() -> None:
    tokens = ids(b"a\xf0\x9fb\xc3")
    assert offsets(tokens) == [0, 1, 1, 2, 3]
    assert tokenizer().decode(tokens)[2] == "b"
    found = TextOffsets(tokenizer(), True)
    for token in tokens:
        found.next(token)
    assert found.finish() == len(tokenizer().decode(tokens)) == 4


def test_special_tokens_that_are_not_shown_take_no_place() -> None:
    tokens = [SPECIAL_STYLES, *ids("ab"), SPECIAL_STYLES, *ids("c")]
    assert offsets(tokens) == [0, 0, 1, 2, 2]
    name = len(tokenizer().decode([SPECIAL_STYLES], skip_special=False))
    assert offsets(tokens, skip_special=False) == [0, name, name + 1, name + 2, 2 * name + 2]


def test_offsets_point_into_the_text() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    vocabulary: Tokenizer = tokenizer()
    for _ in range(50):
        tokens = [*ids("".join(rng.choices("aé😀 €\n", k=12))), SPECIAL_STYLES, *ids("z")]
        text = vocabulary.decode(tokens)
        for token, offset in zip(tokens, offsets(tokens), strict=True):
            own = vocabulary.token_bytes(token)
            if token != SPECIAL_STYLES:
                assert own in text[offset].encode(), (text, offset, own)


def test_tokens_that_are_no_text_keep_their_bytes_apart() -> None:
    first, second = ids(b"\xf0"), ids(b"\xe2")
    token = TokenLogprobs(first[0], -0.5, 1, [first[0], second[0]], [-0.5, -1.0])
    body = CompletionLogprobs(tokenizer(), True).body([token], first)
    assert body["tokens"] == ["bytes:\\xf0"]
    assert body["top_logprobs"] == [{"bytes:\\xf0": -0.5, "bytes:\\xe2": -1.0}]


def test_the_echoed_prompt_and_the_output_are_two_texts() -> None:
    """A character that the prompt leaves unfinished is not finished by the output."""
    prompt, output = ids(b"a\xc3"), ids(b"\xa9b")
    tokens = [TokenLogprobs(token, -0.5, 1, [], []) for token in [*prompt, *output]]
    body = asyncio.run(CompletionLogprobs(tokenizer(), True).whole_body(tokens, [*prompt, *output], 2))
    assert body["text_offset"] == [0, 1, 2, 3]
    assert tokenizer().decode(prompt) + tokenizer().decode(output) == "a\ufffd\ufffdb"


@pytest.mark.parametrize("num_prompt", [0, 1, 700, 1400])
def test_a_whole_list_made_in_parts_is_the_list(num_prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.server.openai import logprobs

    tokens = [TokenLogprobs(i % 200, -0.5, 1, [3, i % 250], [-0.1, -0.5]) for i in range(1400)]
    found = []
    for at_a_time in (1, 64, 10**6):
        monkeypatch.setattr(logprobs, "ENTRIES_AT_A_TIME", at_a_time)
        whole = CompletionLogprobs(tokenizer(), True).whole_body(tokens, [t.token_id for t in tokens], num_prompt)
        found.append(asyncio.run(whole))
    assert found[0] == found[1] == found[2] and len(found[0]["tokens"]) == 1400
