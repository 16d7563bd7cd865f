"""Parses JSON as models write it: other quotes, trailing commas, comments, Python's literals, missing last brackets.

Where a text has more than one reading, such as quotes inside a string that are not escaped, it is refused.
"""

from __future__ import annotations

import re
from typing import Any

MAX_DEPTH = 64
_SPACE = re.compile(r"(?:\s+|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORD = re.compile(r"[A-Za-z_$][A-Za-z0-9_$\-]*")
_LITERALS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None, "undefined": None}
_QUOTES = {'"': '"', "'": "'", "“": "”", "‘": "’", "`": "`", "„": "“", "”": "”", "’": "’"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/", "'": "'", "`": "`"}
_FOLLOWS_STRING = frozenset(",:}]")


class MalformedCall(Exception):
    """Why a text can't be read as a call, in words for the model."""


def parse_json(text: str, at: int = 0, *, may_lack_end: bool = True) -> tuple[Any, int]:
    """Returns the value that begins at `at`, and the place behind it. `may_lack_end`: brackets that are missing at the
    end of the text are closed."""
    parser = _LenientParser(text, may_lack_end)
    value = parser.value(parser.space(at), 0)
    return value, parser.at


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object of these pairs. A key that is there twice has no certain value, so it is refused."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise MalformedCall(f"the key {key!r} is there twice")
        found[key] = value
    return found


class _LenientParser:
    def __init__(self, text: str, may_lack_end: bool) -> None:
        self._text, self._may_lack_end = text, may_lack_end
        self._num_missing = 0  # brackets at the end
        self.at = 0

    def space(self, at: int) -> int:
        found = _SPACE.match(self._text, at)
        return found.end() if found else at

    def value(self, at: int, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise MalformedCall(f"the arguments are nested more than {MAX_DEPTH} deep")
        char = self._text[at : at + 1]
        if char == "{":
            return self._object(at + 1, depth)
        if char == "[":
            return self._list(at + 1, depth)
        if char in _QUOTES:
            return self._string(at)
        number = _NUMBER.match(self._text, at)
        if number and not _WORD.match(self._text, number.end()):
            self.at = number.end()
            return float(number.group()) if re.search(r"[.eE]", number.group()) else int(number.group())
        word = _WORD.match(self._text, at)
        if word and word.group() in _LITERALS:
            self.at = word.end()
            return _LITERALS[word.group()]
        raise MalformedCall(f"a value is missing or has no quotes at {self._near(at)}")

    def _object(self, at: int, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while True:
            at = self.space(at)
            if self._closes(at, "}"):
                return found
            key = self._key(at)
            at = self.space(self.at)
            if self._text[at : at + 1] not in (":", "="):
                raise MalformedCall(f"a colon is missing at {self._near(at)}")
            value = self.value(self.space(at + 1), depth + 1)
            if key in found:
                raise MalformedCall(f"the key {key!r} is there twice")
            found[key] = value
            at = self._next_item(self.space(self.at), "}")

    def _list(self, at: int, depth: int) -> list[Any]:
        found: list[Any] = []
        while True:
            at = self.space(at)
            if self._closes(at, "]"):
                return found
            found.append(self.value(at, depth + 1))
            at = self._next_item(self.space(self.at), "]")

    def _next_item(self, at: int, end: str) -> int:
        """The place of the next item, behind a comma. A comma may be missing only where a line ends."""
        char = self._text[at : at + 1]
        if char == ",":
            return at + 1
        if char == end or (char == "" and self._may_lack_end):
            return at
        if char and "\n" in self._text[self.at : at] and (char in _QUOTES or char in "{["):
            return at
        raise MalformedCall(f"a comma or {end} is missing at {self._near(at)}")

    def _closes(self, at: int, end: str) -> bool:
        """Whether the object or list ends here. One bracket may be missing at the end of the text, behind a closed
        object; where more is missing, arguments may be missing too."""
        if self._text[at : at + 1] == end:
            self.at = at + 1
            return True
        if at >= len(self._text):
            self._num_missing += 1
            if not self._may_lack_end or self._num_missing > 1 or not self._text.rstrip().endswith("}"):
                raise MalformedCall(f"the text ends before {end}")
            self.at = at
            return True
        return False

    def _key(self, at: int) -> str:
        if self._text[at : at + 1] in _QUOTES:
            return self._string(at)
        word = _WORD.match(self._text, at)
        if word is None:
            raise MalformedCall(f"a key is missing at {self._near(at)}")
        self.at = word.end()
        return word.group()

    def _string(self, at: int) -> str:
        opening = self._text[at]
        triple = self._text[at : at + 3]
        if triple in ('"""', "'''"):
            end = self._text.find(triple, at + 3)
            if end < 0:
                raise MalformedCall("a text in triple quotes has no end")
            self.at = end + 3
            return self._text[at + 3 : end]
        closing, place = _QUOTES[opening], at + 1
        parts: list[str] = []
        while place < len(self._text):
            char = self._text[place]
            if char == closing:
                self.at = place + 1
                self._check_end(opening, closing)
                return "".join(parts)
            if char == "\\":
                piece, place = self._escape(place + 1)
                parts.append(piece)
            else:
                parts.append(char)
                place += 1
        raise MalformedCall("a text has no closing quote")

    def _escape(self, at: int) -> tuple[str, int]:
        char = self._text[at : at + 1]
        if char == "u":
            digits = self._text[at + 1 : at + 5]
            if re.fullmatch(r"[0-9a-fA-F]{4}", digits):
                return self._unicode(int(digits, 16), at + 5)
        if char == "\n":
            return "", at + 1  # a backslash before a line break joins two lines
        if char in _ESCAPES:
            return _ESCAPES[char], at + 1
        return "\\" + char, at + 1  # a pattern such as \d, whose backslash should have been doubled

    def _unicode(self, code: int, at: int) -> tuple[str, int]:
        low = re.match(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})", self._text[at : at + 6])
        if 0xD800 <= code < 0xDC00 and low:
            return chr(0x10000 + ((code - 0xD800) << 10) + int(low.group(1), 16) - 0xDC00), at + 6
        return ("�" if 0xD800 <= code < 0xE000 else chr(code)), at

    def _check_end(self, opening: str, closing: str) -> None:
        """Refuses a quote after which no string can end: it was probably meant as part of the string."""
        at = self.space(self.at)
        char = self._text[at : at + 1]
        new_line = "\n" in self._text[self.at : at]
        if char and char not in _FOLLOWS_STRING and not new_line and char not in "=)":
            raise MalformedCall(f"quotes inside a text are not escaped at {self._near(self.at)}")
        if char == "," and not self._item_follows(self.space(at + 1)):
            raise MalformedCall(f"quotes inside a text are not escaped at {self._near(self.at)}")

    def _item_follows(self, at: int) -> bool:
        """Whether a key or a value begins here, or the end; not the rest of a text that was cut by its own quotes."""
        char = self._text[at : at + 1]
        if char in ("", "}", "]", "{", "[", ")") or char in _QUOTES or _NUMBER.match(self._text, at):
            return True
        word = _WORD.match(self._text, at)
        if word is None:
            return False
        behind = self._text[self.space(word.end()) :][:1]
        return word.group() in _LITERALS or behind in (":", "=")

    def _near(self, at: int) -> str:
        shown = self._text[at : at + 24].split("\n")[0]
        return f"{shown!r}" if shown else "the end"
