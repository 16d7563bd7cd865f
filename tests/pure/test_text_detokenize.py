"""Streaming text: any way of cutting the input gives the same output, and nothing handed out is taken back."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from quire.text.detokenize import Detokenizer, StopScanner
from quire.text.tokenizer import Tokenizer
from tests.pure.test_text_support import (
    gguf_of,
    gpt2_words,
    sentencepiece_backend,
    sentencepiece_metadata,
    train_byte_level,
    word_piece_backend,
    write_folder,
)

KINDS = (
    "byte-level",
    "gguf",
    "sentencepiece",
    "gguf-sentencepiece",
    "no-prefix",
    "metaspace",
    "word-piece",
    "no-decoder",
)


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    if kind == "gguf":
        return Tokenizer.from_gguf(gguf_of(train_byte_level(gpt2_words()), "gpt-2"))
    if kind == "gguf-sentencepiece":
        return Tokenizer.from_gguf(sentencepiece_metadata())
    if kind == "no-prefix":
        return Tokenizer.from_gguf(sentencepiece_metadata(add_space_prefix=False))
    if kind == "word-piece":
        backend = word_piece_backend()
    else:
        backend = train_byte_level(gpt2_words()) if kind == "byte-level" else sentencepiece_backend()
    if kind == "metaspace":
        backend.decoder = decoders.Metaspace()
    elif kind == "no-decoder":
        backend.decoder = None
    with TemporaryDirectory() as folder:
        return Tokenizer.from_folder(write_folder(Path(folder), backend))


def cut(whole: Any, places: list[int]) -> list[Any]:
    edges = sorted({0, len(whole), *(place % (len(whole) + 1) for place in places)})
    return [whole[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), skip_special=st.booleans(), places=st.lists(st.integers(0, 100), max_size=8))
def test_any_cutting_of_ids_gives_what_decode_gives(
    kind: str, data: st.DataObject, skip_special: bool, places: list[int]
) -> None:
    tokenizer = tokenizer_of(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size), max_size=24))
    detokenizer = Detokenizer(tokenizer, skip_special)
    parts = [detokenizer.push(part) for part in cut(ids, places)]
    assert "".join([*parts, detokenizer.finish()]) == tokenizer.decode(ids, skip_special=skip_special)
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("kind", ["byte-level", "gguf-sentencepiece"])
def test_a_character_comes_whole_and_as_soon_as_it_is_whole(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    text = "the 🦊 ж dog"
    detokenizer, seen, held = Detokenizer(tokenizer), "", 0
    ids = tokenizer.encode(text, add_special=False)
    for place, token_id in enumerate(ids, start=1):
        seen += detokenizer.push([token_id])
        whole = tokenizer.decode(ids[:place])
        assert seen == whole.rstrip("\ufffd")
        held += whole != seen
    assert seen == text and held >= 3
    assert detokenizer.finish() == ""


def test_an_unfinished_character_is_flushed_as_a_replacement() -> None:
    tokenizer = tokenizer_of("gguf-sentencepiece")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([3 + 0xF0, 3 + 0x9F]) == ""
    assert detokenizer.finish() == "\ufffd"


# -- stop strings


def plain_scan(text: str, stops: Sequence[str], include_stop: bool) -> tuple[str, str | None]:
    """The rule at its word: the first place where some stop is complete, and the longest stop that is."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=30),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4),
    include_stop=st.booleans(),
    places=st.lists(st.integers(0, 100), max_size=10),
)
@example("aabaaab", ["aaab"], False, [3, 5])
@example("abab", ["abb", "ba"], False, [2])
def test_any_cutting_of_text_finds_the_same_stop(
    text: str, stops: list[str], include_stop: bool, places: list[int]
) -> None:
    scanner = StopScanner(stops, include_stop)
    emitted, hit = "", None
    for part in cut(text, places):
        new, hit = scanner.push(part)
        emitted += new
    emitted += scanner.finish()
    assert (emitted, hit) == plain_scan(text, stops, include_stop)


@settings(max_examples=150, deadline=None)
@given(
    st.text(alphabet="ab", max_size=20),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_only_what_may_become_a_stop_is_kept(text: str, stops: list[str]) -> None:
    scanner, emitted = StopScanner(stops), ""
    for end, character in enumerate(text, start=1):
        new, hit = scanner.push(character)
        if hit:
            return
        emitted += new
        kept = text[len(emitted) : end]
        endings = [text[start:end] for start in range(end + 1)]
        assert kept == next(ending for ending in endings if any(stop.startswith(ending) for stop in stops))


def test_stops_that_end_together_and_apart() -> None:
    assert StopScanner(["b", "ab"]).push("xab") == ("x", "ab")  # complete together: the longer
    assert StopScanner(["abc", "b"]).push("xabc") == ("xa", "b")  # complete first
    assert StopScanner(["ab"], include_stop=True).push("xaby") == ("xab", "ab")
    assert StopScanner([]).push("anything") == ("anything", None)


def test_after_a_hit_all_text_is_dropped() -> None:
    scanner = StopScanner(["end"])
    assert scanner.push("the end") == ("the ", "end")
    assert scanner.push(" more") == ("", "end") and scanner.finish() == ""


def test_unarmed_stops_are_text_but_may_begin() -> None:
    scanner = StopScanner(["abab"])
    assert scanner.push("xabab", armed=False) == ("xab", None)  # its last two letters may begin another
    assert scanner.push("ab") == ("", "abab")


def test_a_long_stop_costs_no_more_than_its_length() -> None:
    """Quadratic work would take minutes here."""
    stop = "a" * 4096
    scanner = StopScanner([stop + "b"] * 3)
    emitted = "".join(scanner.push("a" * 10)[0] for _ in range(2000))
    assert len(emitted) == 20_000 - 4096
    assert scanner.push("b") == ("", stop + "b")


def test_a_stop_that_never_begins_costs_nothing() -> None:
    """A request may have 64 stops of 4096 characters for each of its samples."""
    stops = [f"{place}" + "x" * 4000 for place in range(64)]
    tracemalloc.start()
    try:
        scanners = [StopScanner(stops) for _ in range(16)]
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()
    assert scanners[0].push("axxx" * 100) == ("axxx" * 100, None)
