"""Pieces of marker texts: a marker such as `<tool_call>`, a word, white space, or one other character.

Layouts compare and match texts by pieces, so that no marker is cut inside. A text may hold slots, which stand for a
part that differs from call to call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from quire.text.channels.source import Reading, Source

ID, INDEX, KEY, NAME = "\ue0d0", "\ue0d1", "\ue0d2", "\ue0d3"  # slots; their code points are private
SLOT_NAMES = {ID: "⟨id⟩", INDEX: "⟨index⟩", KEY: "⟨key⟩", NAME: "⟨name⟩"}
_SLOTS = f"[{ID}{INDEX}{KEY}{NAME}]"
_TAG = r"<\|(?:open|close)\|>\w+<\|sep\|>"  # Kimi K3 writes a tag as three parts
_PIECE = re.compile(rf"{_TAG}|<[^<>\s{ID}-{NAME}]{{0,80}}>|\[/?[A-Z][A-Z_]+\]|{_SLOTS}|\s+|[^\W_]+|.", re.DOTALL)
_PART = re.compile(rf"{_SLOTS}|[^\s{ID}-{NAME}]+")
_SLOT_WORDS = {
    ID: re.compile(r"[A-Za-z0-9_.\-]"),
    INDEX: re.compile(r"[0-9]"),
    KEY: re.compile(r"[^<>\s\"]"),
    NAME: re.compile(r"[^<>\s\"|\[\]]"),
}


def split(text: str) -> list[str]:
    return _PIECE.findall(text)


def is_marker(piece: str) -> bool:
    return len(piece) > 2 and piece[0] in "<[" and piece[-1] in ">]"


def common_prefix(*texts: str) -> str:
    """The longest text of whole pieces with which all texts begin."""
    shared: list[str] = []
    for pieces in zip(*map(split, texts), strict=False):
        if any(piece != pieces[0] for piece in pieces):
            break
        shared.append(pieces[0])
    return "".join(shared)


def common_suffix(left: str, right: str) -> str:
    """The longest text of whole pieces with which both texts end."""
    shared: list[str] = []
    for one, other in zip(reversed(split(left)), reversed(split(right)), strict=False):
        if one != other:
            break
        shared.append(one)
    return "".join(reversed(shared))


def head(text: str) -> str:
    """The beginning of a marker text that announces it: its first marker, else all up to white space or a slot."""
    found = _PART.search(text)
    if found is None:
        return ""
    first = split(found.group())[0]
    return first if is_marker(first) else found.group()


def shown(text: str) -> str:
    """The text for a person, with its slots named."""
    for slot, name in SLOT_NAMES.items():
        text = text.replace(slot, name)
    return text


def expect(source: Source, text: str) -> Reading[bool]:
    """Read a marker text, with any white space between its parts. Returns False at the first part that is missing."""
    for part in _PART.findall(text):
        yield from source.spaces()
        if part in _SLOT_WORDS:
            if not (yield from source.word(_SLOT_WORDS[part])):
                return False
        elif not (yield from source.match(part)):
            return False
    return True


def expect_after(source: Source, begun: str, text: str) -> Reading[bool]:
    """Read the rest of a marker text whose `head` has been read."""
    at = text.index(begun) + len(begun)
    return (yield from expect(source, text[at:]))


def expect_any(source: Source, texts: Sequence[str]) -> Reading[str | None]:
    """Read one of several texts without slots, exactly but for white space around it. No text may be a prefix of
    another."""
    yield from source.spaces()
    wanted = {text.strip(): text for text in texts}
    found = yield from source.match(*wanted)
    return wanted[found] if found else None
