"""Words in sampling parameters become ids, and only when they are used."""

from __future__ import annotations

from functools import cache

import pytest

from quire.text.resolve import MAX_BAD_WORD_TOKENS, bad_word_ids, resolve_params
from quire.text.tokenizer import Tokenizer
from quire.types import QuireError, SamplingParams
from tests.pure.test_text_support import gguf_of, gpt2_words, sentencepiece_metadata, train_byte_level


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    if kind == "sentencepiece":
        return Tokenizer.from_gguf(sentencepiece_metadata())
    return Tokenizer.from_gguf(gguf_of(train_byte_level(gpt2_words()), "gpt-2"))


def test_params_that_ask_for_nothing_pass_through() -> None:
    params = SamplingParams(dry_multiplier=0.0)
    assert resolve_params(params, tokenizer_of("byte-level")) is params


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@pytest.mark.parametrize("word", ["dog", " dog", "the dog"])
def test_bad_words_with_and_without_a_space_before(kind: str, word: str) -> None:
    tokenizer = tokenizer_of(kind)
    found = bad_word_ids(word, tokenizer)
    written = {b"".join(map(tokenizer.token_bytes, ids)).decode() for ids in found}
    assert written == {word.strip(), " " + word.strip()}
    sentence = tokenizer.encode("in the dog")
    assert any(tuple(sentence[-len(ids) :]) == ids for ids in found)  # it is what the sentence really ends with


def test_resolved_params_keep_what_was_there_and_stay_the_same() -> None:
    tokenizer = tokenizer_of("byte-level")
    params = SamplingParams(bad_words=("dog", "dog"), bad_token_ids=((7, 8),))
    once = resolve_params(params, tokenizer)
    assert once.bad_token_ids[0] == (7, 8) and len(once.bad_token_ids) == 3
    assert resolve_params(once, tokenizer) == once
    assert once.dry_breaker_ids == ()


def test_dry_breakers_are_all_ids_with_such_text() -> None:
    tokenizer = tokenizer_of("byte-level")
    found = resolve_params(SamplingParams(dry_multiplier=0.8), tokenizer).dry_breaker_ids
    breakers = [breaker.encode() for breaker in SamplingParams().dry_breakers]
    assert found == tuple(
        i for i in range(tokenizer.vocab_size) if any(breaker in tokenizer.token_bytes(i) for breaker in breakers)
    )
    assert len(found) >= 4


def test_a_special_token_can_be_a_bad_word() -> None:
    assert (2,) in bad_word_ids("<|im_end|>", tokenizer_of("byte-level"))


def test_bad_words_come_to_so_many_tokens() -> None:
    tokenizer = tokenizer_of("byte-level")
    words = tuple(f"{number} " + "\x02" * 4000 for number in range(1 + MAX_BAD_WORD_TOKENS // 8000))
    with pytest.raises(QuireError, match=f"more than {MAX_BAD_WORD_TOKENS} tokens") as refused:
        resolve_params(SamplingParams(bad_words=words), tokenizer)
    assert refused.value.param == "bad_words"
    assert resolve_params(SamplingParams(bad_words=words[:4]), tokenizer).bad_token_ids
