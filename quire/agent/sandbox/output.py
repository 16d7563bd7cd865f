"""What a sandboxed command printed: the beginning and the end within bounds, as text that is safe for a terminal."""

from __future__ import annotations

import re

KEPT_BYTES = 128 << 10  # at each end
# Escape sequences (CSI, OSC, DCS and the short ones), then all other control characters.
_SEQUENCES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x9b[0-?]*[ -/]*[@-~]|\x1b[ -/]*[0-~]?", re.DOTALL
)
_OVERPRINT = re.compile(r"[^\n]*\r(?!\n)")
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
# Characters that change the direction or hide the order of what is shown.
_DIRECTIONS = dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C, 0xFEFF])


def clean_text(text: str) -> str:
    """Returns the text as a terminal would show it at the end: without escape sequences and control characters, and of
    a line that was written over, the last version."""
    text = _SEQUENCES.sub("", text)
    text = _OVERPRINT.sub("", text.replace("\r\n", "\n"))
    return text.translate(_CONTROLS).translate(_DIRECTIONS)


class KeptOutput:
    """Collects output and keeps its two ends."""

    def __init__(self, kept: int = KEPT_BYTES) -> None:
        self._kept = kept
        self._head = bytearray()
        self._tail = bytearray()
        self.num_bytes = 0

    def add(self, data: bytes) -> None:
        self.num_bytes += len(data)
        room = self._kept - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._kept:
            del self._tail[: -self._kept]

    @property
    def num_dropped(self) -> int:
        return max(0, self.num_bytes - len(self._head) - min(len(self._tail), self._kept))

    def raw_text(self) -> str:
        return bytes(self._head + self._tail[-self._kept :]).decode("utf-8", "replace")

    def text(self) -> str:
        """Returns the text. Binary output is described instead."""
        head, tail = bytes(self._head), bytes(self._tail[-self._kept :])
        if head[:4096].count(0) > len(head[:4096]) // 20:
            return f"[binary output, {self.num_bytes} bytes]"
        shown = clean_text(head.decode("utf-8", "replace"))
        if not tail:
            return shown
        note = f"\n[… {self.num_dropped} bytes left out …]\n" if self.num_dropped else ""
        return shown + note + clean_text(tail.decode("utf-8", "replace"))


def trim_text(text: str, most: int) -> str:
    """Returns at most about `most` characters: the first and the last, with a note of what was left out."""
    if len(text) <= most:
        return text
    head, tail = most * 2 // 3, most - most * 2 // 3
    num = len(text) - head - tail
    return f"{text[:head]}\n[… {num} characters left out of {len(text)} …]\n{text[len(text) - tail :]}"
