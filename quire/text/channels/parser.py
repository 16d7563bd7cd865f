"""The state machine that splits a model's text into channels: reasoning first, then text and tool calls.

Front ends hold one `ChannelParser` per sample, push the text of each chunk and forward the events. Once neighbouring
deltas are merged, the events do not depend on how the text was chunked. The rules:

- Reasoning comes first, between its markers, or up to the closing marker if the prompt contains the opening one. White
  space around it is dropped. If it is never closed, the whole output is reasoning.
- White space next to a tool call is dropped; all other text is emitted unchanged.
- Text that only resembles a call is text. A call whose arguments break off ends there, and the rest is text. At the end
  of the output, a call that is not yet certain is text; a certain one is ended with the arguments so far.
- Output that was cut (token limit or stop string) may end inside a call: after a marker it is an incomplete call if the
  name is known, and is dropped otherwise, as is a partial marker.
- Only text that may still become a marker (or a call, up to MAX_HELD characters) is held back.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.text.channels.events import Event, EventLog, TextDelta, ToolSpec
from quire.text.channels.formats import FORMATS
from quire.text.channels.formats.seam import ToolFormat
from quire.text.channels.reasoning import NO_MARKERS, THINK, AnswerMarkers, ReasoningStyle
from quire.text.channels.source import Reading, Source
from quire.types import QuireError


class ChannelParser:
    """Splits one sample's text into channels."""

    def __init__(
        self,
        tool_format: ToolFormat | None,
        style: ReasoningStyle | None,
        *,
        answer: AnswerMarkers = NO_MARKERS,
        reasoning_open: bool = False,
        tools: Sequence[ToolSpec] = (),
        must_call: bool = False,
    ):
        self._log = EventLog()
        self._source = Source(self._log)
        self._format = tool_format
        self._style = style
        self._answer = answer
        self._reasoning_open = reasoning_open
        self._tools = tuple(tools)
        self._must_call = must_call
        self._reading = self._read()
        next(self._reading, None)

    def push(self, text: str) -> list[Event]:
        """The events that are certain after this text."""
        if text and not self._source.closed:
            self._source.feed(text)
            next(self._reading, None)
        return self._log.take()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """The remaining events at the end of the text. `cut`: a token limit or a stop string ended it, and the model
        would have written more."""
        if not self._source.closed:
            self._source.closed, self._source.cut = True, cut
            next(self._reading, None)
        events = self._log.take()
        if cut and self._must_call:  # text held back is the beginning of a call, even without a marker
            events = [event for event in events if not isinstance(event, TextDelta)]
        return events

    def _read(self) -> Reading[None]:
        if self._style is not None:
            yield from self._read_reasoning(self._style)
        if self._format is None or not self._format.frames_text:
            yield from self._read_answer_open()
        if self._format is None:
            yield from self._source.rest(self._log.text)
        else:
            yield from self._format.read(self._source, self._tools)

    def _read_answer_open(self) -> Reading[None]:
        """Read the marker before the answer, if it is there. The one after it is dropped wherever text is read."""
        marker, source = self._answer.open, self._source
        if self._answer.close:
            source.drops = tuple({self._answer.close, marker})
        if marker:
            source.keep("", may_be_text=True)
            yield from source.spaces()
            if (yield from source.match(marker)):
                source.settle()
            source.give_back()

    def _read_reasoning(self, style: ReasoningStyle) -> Reading[None]:
        source = self._source
        source.keep("", may_be_text=True)
        yield from source.spaces()
        is_opened = bool((yield from source.match(style.open)))  # some models repeat the marker that ends the prompt
        if not is_opened and not self._reasoning_open:
            source.give_back()
            return
        source.settle()
        yield from source.spaces()
        yield from source.plain(source.log.reasoning, (style.close,))
        yield from source.spaces()


def make_channel_parser(
    tool_format: ToolFormat | str | None,
    *,
    reasoning: bool | ReasoningStyle = False,
    answer: AnswerMarkers = NO_MARKERS,
    reasoning_open: bool = False,
    tools: Sequence[ToolSpec] = (),
    must_call: bool = False,
) -> ChannelParser:
    """A parser for one sample. `tool_format` is a format or its name; None or "none" for requests without tools or with
    `tool_choice` none; `reasoning` true means `<think>`. `reasoning_open`: the prompt ends with the opening marker (see
    `opens_reasoning`). `must_call`: a grammar restricts the answer to calls."""
    style = THINK if reasoning is True else (reasoning or None)
    found = format_named(tool_format) if isinstance(tool_format, str) else tool_format
    return ChannelParser(
        found,
        style,
        answer=answer,
        reasoning_open=reasoning_open,
        tools=tools,
        must_call=found is not None and must_call,
    )


def format_named(name: str) -> ToolFormat | None:
    """The format of this name, None for `none`. Raises for an unknown name, with the list of formats."""
    if name == "none":
        return None
    if name not in FORMATS:
        known = ", ".join([*FORMATS, "none"])
        what = f"The tool-call format {name!r} is not known."
        raise QuireError("invalid_parameter", what, f"Known are: {known}.", "tool_format")
    return FORMATS[name]
