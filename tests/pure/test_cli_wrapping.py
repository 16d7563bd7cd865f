"""Answers wrapped at words: what a terminal shows, however the text comes in pieces."""

from __future__ import annotations

import random
import re

import pytest

from quire.cli.wrapping import WordWrap


def shown(text: str, columns: int, cuts: list[int] | None = None) -> list[str]:
    """The lines a terminal of this width shows, without spaces at their ends."""
    wrap, out, start = WordWrap(lambda: columns), "", 0
    for stop in [*(cuts or []), len(text)]:
        out += wrap.feed(text[start:stop])
        start = stop
    lines, column = [""], 0
    for back, character in re.findall(r"\x1b\[(\d+)D\x1b\[K|([^\x1b])", out, re.DOTALL):
        if back:
            assert column < columns, "a cursor behind the last column can't be moved back"
            column -= int(back)
            lines[-1] = lines[-1][:column]
        elif character == "\n":
            lines, column = [*lines, ""], 0
        else:
            if column == columns:
                lines, column = [*lines, ""], 0
            lines[-1] += character
            column += 1
    return [line.rstrip(" ") for line in lines]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three", ["one two", "three"]),
        ("one  two\n\nthree ", ["one  two", "", "three"]),
        ("one two  three", ["one two", "three"]),
        ("a https://example.org/long", ["a", "https://ex", "ample.org/", "long"]),
        ("- indented\n  words", ["-", "indented", "  words"]),
        ("```\nleft as it is\n```\nand now again", ["```", "left as it", " is", "```", "and now", "again"]),
    ],
)
def test_lines_are_broken_between_words(text: str, lines: list[str]) -> None:
    assert shown(text, 10) == lines


def test_wide_characters_count_twice_and_break_anywhere() -> None:
    wrap = WordWrap(lambda: 8)
    assert wrap.feed("文字文字文字") == "文字文\n字文字"


def test_pieces_make_no_difference() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        text = "".join(rng.choice("abcde \n") for _ in range(rng.randrange(120)))
        columns = rng.randrange(4, 30)
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randrange(9))))
        lines = shown(text, columns)
        assert shown(text, columns, cuts) == lines
        assert "".join(lines).replace(" ", "") == text.replace(" ", "").replace("\n", "")
        assert all(len(line) <= columns for line in lines)
