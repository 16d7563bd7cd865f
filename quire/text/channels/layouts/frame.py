"""The frame around calls: the markers of a turn's section of calls and of each call in it, the same for all layouts."""

from __future__ import annotations

from dataclasses import dataclass

from quire.text.channels.layouts.pieces import expect, expect_after, head, is_marker, split
from quire.text.channels.source import Reading, Source


@dataclass(frozen=True, slots=True)
class CallFrame:
    """Texts around the calls of one turn. All may be empty, or hold slots."""

    section_open: str = ""  # before the first call
    open: str = ""  # before each call, up to its name or its brace
    close: str = ""  # after each call
    between: str = ""  # between two calls, besides close and open
    section_close: str = ""  # after the last call
    is_single: bool = False  # the template writes one call per message

    @property
    def opening(self) -> str:
        """The whole text before the first call."""
        return self.section_open + self.open

    @property
    def trigger(self) -> str:
        """The first marker before the first call."""
        return head(self.opening)

    @property
    def triggers(self) -> tuple[str, ...]:
        """The texts that announce a call."""
        found = [head(self.opening), head(self.open), head(self._inner)]
        texts = [text for index, text in enumerate(found) if text and text not in found[:index]]
        return tuple(text for text in texts if not any(other != text and text.startswith(other) for other in texts))

    @property
    def _inner(self) -> str:
        """What follows the first marker before each call, if it is one too: some models omit the first."""
        first = head(self.open)
        rest = self.open.partition(first)[2].lstrip() if first else ""
        return rest if len(rest) > 2 and rest[0] == "<" else ""

    def read_opening(self, source: Source, trigger: str) -> Reading[bool]:
        """Read the rest of the text before a call, after the trigger that announced it."""
        if trigger == head(self.opening):
            if not self.section_open.strip():
                return (yield from expect_after(source, trigger, self.opening))
            if not (yield from expect_after(source, trigger, self.section_open)):
                return False
            return not self.open.strip() or (yield from expect(source, self.open))
        return (yield from expect_after(source, trigger, self.open))

    def read_close(self, source: Source) -> Reading[None]:
        """Read what follows a call up to the next, as far as it is there. Markers are dropped, other text is kept."""
        between = self.between if any(map(is_marker, split(self.between))) else ""
        if self.close.strip():
            yield from _optional(source, self.close)
        if not (between.strip() and (yield from _optional(source, between))) and self.section_close.strip():
            yield from _optional(source, self.section_close)


def _optional(source: Source, text: str) -> Reading[bool]:
    """Read a marker text if it comes next. Text that only begins like it is given back as text."""
    source.keep("")
    yield from source.spaces()
    begun = head(text)
    if not (yield from source.match(begun)):
        source.give_back_unless_blank()
        return False
    source.settle()
    yield from expect_after(source, begun, text)
    return True
