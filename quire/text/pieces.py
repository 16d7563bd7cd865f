"""Maps a token's spelling in a vocabulary to bytes, for `Tokenizer`.

Vocabularies spell bytes in one of two ways. Byte-level ones use one printable character per byte; SentencePiece ones
write text with "▁" for a space and `<0x0A>` for a single byte. All others (such as WordPiece) are `opaque`: only the
`tokenizers` library can join their tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

SPACE_MARK = "▁"
_LONE_BYTES = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}


def _byte_alphabet() -> dict[str, int]:
    """Byte-level spelling: printable Latin-1 maps to itself, the other 68 bytes to U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


BYTE_OF_CHARACTER = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class PieceRule:
    """How tokens become bytes, and whether decoding removes the leading space that encoding adds."""

    kind: Literal["byte_level", "sentencepiece", "opaque"]
    strip_space: bool = False

    def to_bytes(self, token: str, *, is_special: bool, is_added: bool) -> bytes:
        """The token's bytes. Special and added tokens are plain text, except for SentencePiece's space mark in added
        ones."""
        if is_special or self.kind == "opaque":
            return token.encode()
        if self.kind == "sentencepiece":
            lone = _LONE_BYTES.get(token) if not is_added else None
            return lone if lone is not None else token.replace(SPACE_MARK, " ").encode()
        if is_added:
            return token.encode()
        try:
            return bytes([BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:  # not spelled in bytes, so it is text that was not marked as added
            return token.encode()


def rule_of_decoder(decoder: Any) -> PieceRule:
    """The rule of a `tokenizers` decoder; opaque for any decoder that is not one of the usual forms."""
    if decoder is None:
        return PieceRule("opaque")
    steps = flatten(json.loads(decoder.__getstate__()), "decoders")
    types = [step["type"] for step in steps]
    if types == ["ByteLevel"]:
        return PieceRule("byte_level")
    if types == ["Metaspace"]:
        step = steps[0]
        is_usual = step.get("replacement") == SPACE_MARK
        strips = step.get("prepend_scheme", "always") != "never"
        return PieceRule("sentencepiece", strip_space=strips) if is_usual else PieceRule("opaque")
    strips = bool(steps) and _is_leading_strip(steps[-1])
    if strips:
        types.pop()
    if types in (["Replace", "ByteFallback", "Fuse"], ["Replace", "Fuse"]) and _is_space_mark_replace(steps[0]):
        return PieceRule("sentencepiece", strip_space=strips)
    return PieceRule("opaque")


def flatten(component: dict[str, Any], children: str) -> list[dict[str, Any]]:
    """The steps of a possibly nested `Sequence`, in order; a single step gives a list of one."""
    if component.get("type") != "Sequence":
        return [component]
    return [step for child in component.get(children, []) for step in flatten(child, children)]


def _is_leading_strip(step: dict[str, Any]) -> bool:
    return step["type"] == "Strip" and step.get("content") == " " and step.get("start") == 1 and step.get("stop") == 0


def _is_space_mark_replace(step: dict[str, Any]) -> bool:
    return step.get("pattern") == {"String": SPACE_MARK} and step.get("content") == " "
