"""Markdown that is still being written: whole blocks are printed for good, the last one is redrawn as it grows.

A terminal can't change what has scrolled away, so a block is printed once, when the next one begins.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.live import Live

_FENCE = re.compile(r" {0,3}(```+|~~~+)")
_ITEM = re.compile(r"\s{0,3}(?:[-*+]|\d{1,9}[.)])\s")
_HEADING = re.compile(r"#{1,6}\s")
_REDRAWS = 10.0  # per second


def split_blocks(text: str) -> tuple[list[str], str]:
    """Returns the blocks that are complete, and the rest. A list with blank lines between its items is one block, so
    that its numbers go on."""
    blocks: list[str] = []
    start, at = 0, 0
    fence, was_blank, in_list = "", False, False
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        marks = _FENCE.match(line)
        if fence:
            if marks and marks[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
                if not in_list:
                    blocks.append(text[start : at + len(line)])
                    start = at + len(line)
        elif not line.strip():
            was_blank = True
            at += len(line)
            continue
        else:
            is_item, is_indented = bool(_ITEM.match(line)), line[0] in " \t"
            begins = was_blank and not is_indented and not (in_list and is_item)
            if at > start and (begins or _HEADING.match(line)):
                blocks.append(text[start:at])
                start = at
            if at == start or begins:
                in_list = is_item
            if marks:
                fence = marks[1]
        was_blank = False
        at += len(line)
    return [block for block in blocks if block.strip()], text[start:]


class LinesView:
    """What is shown, without empty lines before and after it; of a part that is redrawn, the last lines that fit on the
    screen."""

    def __init__(self, shown: RenderableType, *, is_tail: bool = False) -> None:
        self._shown, self._is_tail = shown, is_tail

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        lines = console.render_lines(self._shown, options, pad=False)
        places = [index for index, line in enumerate(lines) if any(part.text.strip() for part in line)]
        lines = lines[places[0] : places[-1] + 1] if places else []
        for line in lines[-max(3, console.height - 4) :] if self._is_tail else lines:
            yield from line
            yield Segment.line()


class LiveArea:
    """The part at the bottom of a terminal that is redrawn. Elsewhere than in a terminal nothing is drawn."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None

    def show(self, shown: RenderableType) -> None:
        if not self.console.is_terminal or self.console.is_dumb_terminal:
            return
        if self._live is None:
            from rich.live import Live

            self._live = Live(
                console=self.console, transient=True, refresh_per_second=_REDRAWS, vertical_overflow="visible"
            )
            self._live.start()
        self._live.update(LinesView(shown, is_tail=True))

    def clear(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


class MarkdownStream:
    """One answer on its way to the screen."""

    def __init__(self, area: LiveArea) -> None:
        self._area, self._rest = area, ""

    def feed(self, text: str) -> None:
        blocks, self._rest = split_blocks(self._rest + text)
        for block in blocks:
            self._print(block)
        if self._rest.strip():
            self._area.show(_rendered(self._rest))

    def finish(self) -> None:
        rest, self._rest = self._rest, ""
        self._area.clear()
        if rest.strip():
            self._print(rest)

    def _print(self, block: str) -> None:
        self._area.clear()
        self._area.console.print(LinesView(_rendered(block)))
        self._area.console.print()


def _rendered(text: str) -> RenderableType:
    from rich.markdown import Markdown

    return Markdown(text.strip("\n"), hyperlinks=False)
