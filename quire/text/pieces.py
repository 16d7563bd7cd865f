"""What a token's written form in a vocabulary means in bytes. `Tokenizer` asks it; nobody else needs to.

Vocabularies write bytes in one of two ways. Byte-level ones spell each byte as one printable character; SentencePiece
ones write text with "▁" for a space and `<0x0A>` for a lone byte. Whatever else exists (WordPiece and the like) is
`opaque`: only the `tokenizers` library can join such tokens to text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

SPACE_MARK = "▁"
_LONE_BYTES = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}


def _byte_alphabet() -> dict[str, int]:
    """Byte-level spelling: printable Latin-1 stands for itself, the other 68 bytes follow from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


BYTE_OF_CHARACTER = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class PieceRule:
    """How tokens become bytes, and whether the one space that encoding put in front is taken off again."""

    kind: Literal["byte_level", "sentencepiece", "opaque"]
    strip_space: bool = False

    def to_bytes(self, token: str, *, is_special: bool, is_added: bool) -> bytes:
        """Special tokens stand for their own text; so do added ones, but for the space mark of SentencePiece."""
        if is_special or self.kind == "opaque":
            return token.encode()
        if self.kind == "sentencepiece":
            lone = _LONE_BYTES.get(token) if not is_added else None
            return lone if lone is not None else token.replace(SPACE_MARK, " ").encode()
        if is_added:
            return token.encode()
        try:
            return bytes([BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:  # not in the byte spelling, so it is text that was never marked as added
            return token.encode()


def rule_of_decoder(decoder: Any) -> PieceRule:
    """Read the rule off a `tokenizers` decoder. A decoder that does anything unusual makes the vocabulary opaque."""
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
    """The steps of a `Sequence` of any depth, in order; a single step is a list of one."""
    if component.get("type") != "Sequence":
        return [component]
    return [step for child in component.get(children, []) for step in flatten(child, children)]


def _is_leading_strip(step: dict[str, Any]) -> bool:
    return step["type"] == "Strip" and step.get("content") == " " and step.get("start") == 1 and step.get("stop") == 0


def _is_space_mark_replace(step: dict[str, Any]) -> bool:
    return step.get("pattern") == {"String": SPACE_MARK} and step.get("content") == " "
