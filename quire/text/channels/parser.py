"""The one state machine between a model's text and its channels: reasoning first, then text and tool calls.

Front ends hold one `ChannelParser` per sample, push the text of each chunk and pass the events on. Every chunking of a
text gives the same events once neighbouring deltas are merged. What the rules are:

- Reasoning stands at the beginning, between its markers, or up to the closing one if the prompt opened it already.
  White space around it is framing and dropped. Reasoning that is never closed is all there is.
- White space next to a tool call is framing and dropped; all other text comes out as it was written.
- What looks like a call and is none is text. A call whose arguments break off is ended there, and the rest is text. A
  call that was never certain when the text ended is text; one that was is ended, its arguments as far as they came.
- A text that was cut (out of tokens, or by a stop string) may have been about to become a call: what stands behind a
  marker is then a call that is not whole if its name is known, and else dropped, as is a part of a marker itself.
- Only what may still become a marker (or a call, for at most MAX_HELD characters) is kept back.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.text.channels.events import Event, EventLog, TextDelta, ToolSpec
from quire.text.channels.formats import FORMATS
from quire.text.channels.formats.seam import ToolFormat
from quire.text.channels.reasoning import THINK, ReasoningStyle
from quire.text.channels.source import Reading, Source
from quire.types import QuireError


class ChannelParser:
    def __init__(
        self,
        tool_format: ToolFormat | None,
        style: ReasoningStyle | None,
        *,
        reasoning_open: bool = False,
        tools: Sequence[ToolSpec] = (),
        must_call: bool = False,
    ):
        self._log = EventLog()
        self._source = Source(self._log)
        self._format = tool_format
        self._style = style
        self._reasoning_open = reasoning_open
        self._tools = tuple(tools)
        self._must_call = must_call
        self._reading = self._read()
        next(self._reading, None)

    def push(self, text: str) -> list[Event]:
        """The events this text makes certain."""
        if text and not self._source.closed:
            self._source.feed(text)
            next(self._reading, None)
        return self._log.take()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """The text has ended: what was kept back, and the end of a call that was open. `cut`: it was stopped in
        mid-course, and the model would have written more."""
        if not self._source.closed:
            self._source.closed, self._source.cut = True, cut
            next(self._reading, None)
        events = self._log.take()
        if cut and self._must_call:  # what was kept back is the beginning of a call, even without a marker
            events = [event for event in events if not isinstance(event, TextDelta)]
        return events

    def _read(self) -> Reading[None]:
        if self._style is not None:
            yield from self._read_reasoning(self._style)
        if self._format is None:
            yield from self._source.rest(self._log.text)
        else:
            yield from self._format.read(self._source, self._tools)

    def _read_reasoning(self, style: ReasoningStyle) -> Reading[None]:
        source = self._source
        source.keep("", may_be_text=True)
        yield from source.spaces()
        is_opened = bool((yield from source.match(style.open)))  # some write it although the prompt did
        if not is_opened and not self._reasoning_open:
            source.give_back()
            return
        source.settle()
        yield from source.spaces()
        yield from source.plain(source.log.reasoning, (style.close,))
        yield from source.spaces()


def make_channel_parser(
    format_name: str | None,
    *,
    reasoning: bool | ReasoningStyle = False,
    reasoning_open: bool = False,
    tools: Sequence[ToolSpec] = (),
    must_call: bool = False,
) -> ChannelParser:
    """A parser for one sample. `format_name` is one of `FORMATS`, or None or "none" where no calls are looked for (a
    request without tools, or with `tool_choice` none); `reasoning` true means `<think>`. `reasoning_open`: the prompt
    ended with the opening marker already (see `opens_reasoning`). `must_call`: a grammar makes the answer calls."""
    style = THINK if reasoning is True else (reasoning or None)
    if format_name is None or format_name == "none":
        return ChannelParser(None, style, reasoning_open=reasoning_open)
    if format_name not in FORMATS:
        known = ", ".join([*FORMATS, "none"])
        what = f"The tool-call format {format_name!r} is not known."
        raise QuireError("invalid_parameter", what, f"Known are: {known}.", "tool_format")
    return ChannelParser(FORMATS[format_name], style, reasoning_open=reasoning_open, tools=tools, must_call=must_call)
