"""Reads the frame around calls: which part of the text before, between and after calls belongs to each call."""

from __future__ import annotations

from quire.text.channels.layouts import CallFrame
from quire.text.channels.layouts.pieces import INDEX, common_prefix, common_suffix, split


def make_frame(before: str, between: str | None, after: str) -> CallFrame:
    """The frame of calls from the texts before the first call, between two calls (None: only one is written) and after
    the last."""
    if between is None:
        return CallFrame(open=before, close=after, is_single=True)
    opening = common_suffix(before, between)
    opening = opening if any(char.isalnum() for char in opening) or len(opening.strip()) > 2 else ""
    rest = between[: len(between) - len(opening)]
    close = common_prefix(rest, after)
    close = close if close.strip() else ""
    section = before[: len(before) - len(opening)]
    if not section.strip():
        section, opening = "", section + opening
    return CallFrame(section, opening, close, rest[len(close) :], after[len(close) :])


def numbered(between: str, before: str) -> tuple[str, str]:
    """The texts before a first and a second name, with a slot for the call's number."""
    one, other = split(before), split(between)
    for at in range(1, min(len(one), len(other)) + 1):
        if one[-at] != other[-at]:
            if not (one[-at].isdigit() and other[-at].isdigit()):
                break
            one[-at] = other[-at] = INDEX
    return "".join(other), "".join(one)


def slotted(first: str, second: str) -> str:
    """The text with a slot for each number that differs between the first and the second call."""
    one, other = split(first), split(second)
    if len(one) != len(other):
        return first
    pairs = zip(one, other, strict=True)
    return "".join(INDEX if a != b and a.isdigit() and b.isdigit() else a for a, b in pairs)
