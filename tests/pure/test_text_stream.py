"""One request's text: stop strings, stop ids, min_tokens and what is shown of each."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.delta_decoder import DeltaDecoder
from quire.text.stream import TextStream
from quire.text.tokenizer import Tokenizer
from quire.types import Delta, FinishReason, SamplingParams
from tests.pure.test_text_support import gguf_of, gpt2_words, train_byte_level


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(gguf_of(train_byte_level(gpt2_words()), "gpt-2"))


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special=False)


def run(ids: list[int], size: int = 1, **params: Any) -> tuple[str, TextStream]:
    stream = TextStream(tokenizer(), SamplingParams(**params))
    text = "".join(stream.push(ids[start : start + size]) for start in range(0, len(ids), size))
    return text + stream.finish(), stream


@pytest.mark.parametrize("size", [1, 3, 100])
def test_plain_text(size: int) -> None:
    ids = ids_of("the quick 漢字 🎉 dog")
    text, stream = run(ids, size)
    assert text == "the quick 漢字 🎉 dog"
    assert not stream.stopped and stream.num_tokens_used == len(ids)


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize(("include_stop", "expected"), [(False, "the "), (True, "the dog")])
def test_a_stop_string_ends_the_text(size: int, include_stop: bool, expected: str) -> None:
    ids = ids_of("the dog and the dog")
    text, stream = run(ids, size, stop=("dog",), include_stop=include_stop)
    assert text == expected
    assert stream.stopped and stream.stop_reason == "dog"
    used = tokenizer().decode(ids[: stream.num_tokens_used])
    assert "dog" in used and "dog" not in tokenizer().decode(ids[: stream.num_tokens_used - 1])


def test_text_that_only_looked_like_a_stop_is_given_out_at_the_end() -> None:
    text, stream = run(ids_of("the do"), stop=("dog",))
    assert text == "the do" and not stream.stopped


def test_a_stop_within_the_first_tokens_is_text() -> None:
    ids = ids_of("dog dog dog")
    first = len(ids_of("dog"))
    text, stream = run(ids, stop=("dog",), min_tokens=first)
    assert text == "dog " and stream.stopped
    assert run(ids, stop=("dog",), min_tokens=first - 1)[0] == ""
    assert run(ids, stop=("dog",), min_tokens=len(ids))[0] == "dog dog dog"


def test_a_stop_that_ends_after_the_first_tokens_counts() -> None:
    ids = ids_of("dog dog")
    text, stream = run(ids, stop=("g d",), min_tokens=len(ids_of("dog")))
    assert text == "do" and stream.stopped


def test_end_of_sequence_ends_the_text_and_shows_nothing() -> None:
    ids = [*ids_of("the dog"), 2, *ids_of(" more")]
    text, stream = run(ids, size=100)
    assert text == "the dog" and stream.stopped and stream.stop_reason == 2
    assert stream.num_tokens_used == len(ids_of("the dog")) + 1
    assert run(ids, skip_special_tokens=False)[0] == "the dog"
    assert run(ids, skip_special_tokens=False, include_stop=True)[0] == "the dog<|im_end|>"
    assert run(ids, include_stop=True)[0] == "the dog"  # special tokens are not shown at all
    assert run(ids, ignore_eos=True)[0] == "the dog more"
    assert run(ids, min_tokens=len(ids))[0] == "the dog more"


def test_an_ordinary_stop_id_is_shown_only_with_include_stop() -> None:
    ids = ids_of("the dog")
    stop_id = ids[-1]
    shown = tokenizer().decode(ids[:-1])
    text, stream = run([*ids, *ids], size=2, stop_token_ids=(stop_id,))
    assert text == shown and stream.stop_reason == stop_id and stream.num_tokens_used == len(ids)
    assert run([*ids, *ids], stop_token_ids=(stop_id,), include_stop=True)[0] == "the dog"


def test_the_engine_may_know_more_stop_ids() -> None:
    ids = ids_of("the dog")
    stream = TextStream(tokenizer(), SamplingParams(), stop_ids={ids[-1]})
    assert stream.push([2, *ids]) == tokenizer().decode(ids[:-1]) and stream.stopped


def test_kept_text_comes_out_after_a_stop_id() -> None:
    text, stream = run([*ids_of("the do"), 2], stop=("dog",))
    assert text == "the do" and stream.stop_reason == 2


@settings(max_examples=100, deadline=None)
@given(
    ids=st.lists(st.integers(0, 300), max_size=20),
    size=st.integers(1, 20),
    min_tokens=st.integers(0, 6),
    stop=st.lists(st.sampled_from(["a", "b", "e ", "th", "\ufffd", "!"]), max_size=2),
    include_stop=st.booleans(),
)
def test_any_size_of_delta_gives_the_same(
    ids: list[int], size: int, min_tokens: int, stop: list[str], include_stop: bool
) -> None:
    params: dict[str, Any] = {"stop": tuple(stop), "min_tokens": min_tokens, "include_stop": include_stop}
    text, stream = run(ids, size, **params)
    expected, one_by_one = run(ids, 1, **params)
    assert text == expected
    assert (stream.stopped, stream.stop_reason) == (one_by_one.stopped, one_by_one.stop_reason)
    assert stream.num_tokens_used == one_by_one.num_tokens_used


def test_a_delta_ends_at_its_stop_string_and_asks_for_a_cancel() -> None:
    decoder = DeltaDecoder(tokenizer(), SamplingParams(stop=("xy",)), ())
    ids = [token for char in "axyz" for token in ids_of(char)]
    new = decoder.push(Delta("r", ids))
    assert (new.text, new.token_ids, new.finish_reason, new.cancel) == ("a", ids[:3], FinishReason.STOP, True)
    late = decoder.push(Delta("r", ids, finish_reason=FinishReason.CANCELLED))
    assert (late.text, late.token_ids, late.finish_reason, late.cancel) == ("", [], FinishReason.STOP, False)
    assert (decoder.num_tokens, decoder.stop_text) == (3, "xy")


def test_a_stop_string_in_the_last_delta_is_a_stop_and_needs_no_cancel() -> None:
    decoder = DeltaDecoder(tokenizer(), SamplingParams(stop=("b",)), ())
    new = decoder.push(Delta("r", [*ids_of("a"), *ids_of("b")], finish_reason=FinishReason.LENGTH))
    assert (new.text, new.finish_reason, new.cancel) == ("a", FinishReason.STOP, False)


def test_without_a_tokenizer_every_text_is_empty() -> None:
    decoder = DeltaDecoder(None, SamplingParams(), (7,))
    new = decoder.push(Delta("r", [5, 6, 7], finish_reason=FinishReason.STOP))
    assert (new.text, new.token_ids, new.finish_reason, new.cancel) == ("", [5, 6, 7], FinishReason.STOP, False)
    assert decoder.num_tokens == 3
