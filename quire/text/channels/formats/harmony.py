"""Harmony, the format of gpt-oss: messages with a channel and a recipient, between special tokens.

`<|channel|>analysis<|message|>` is reasoning, `final` the answer, and a recipient `to=functions.name` makes a message
in the channel `commentary` a call. A turn may hold several messages; each further one begins with `<|start|>`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from quire.text.channels.events import ToolSpec
from quire.text.channels.formats.seam import ToolFormat
from quire.text.channels.grammar_text import ANY_TEXT, GrammarText, either, joined
from quire.text.channels.reasoning import AnswerMarkers, ReasoningStyle
from quire.text.channels.source import JsonSpan, Reading, Source

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN, CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
_ENDS = (END, CALL, RETURN, START)
_MAX_HEADER = 256
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.\-]+)")
_CHANNEL = re.compile(rf"(?:{re.escape(CHANNEL)}|^)\s*(analysis|commentary|final)")
_ROLE = re.compile(r"[a-z]")


class Harmony:
    """Implements `TaughtFormat`."""

    name = "harmony"
    markers: tuple[str, ...] = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
    trigger = f"{CHANNEL}commentary to=functions."
    repeats = False
    frames_text = True
    plain_key = ""
    style = ReasoningStyle("harmony", f"{CHANNEL}analysis{MESSAGE}", END)
    answer = AnswerMarkers(f"{START}assistant{CHANNEL}final{MESSAGE}", END)
    description = f"{CHANNEL}commentary to=functions.⟨name⟩ {CONSTRAIN}json{MESSAGE}⟨arguments⟩{CALL}"

    def is_taught_by(self, template: str, found: ToolFormat | None) -> bool:
        return all(mark in template for mark in (CHANNEL, MESSAGE, "commentary", "analysis"))

    def read(self, source: Source, tools: Sequence[ToolSpec]) -> Reading[None]:
        has_start = False
        while has_start or (yield from source.more()):
            is_message, has_start = yield from _read_message(source, has_start, bool(tools))
            if is_message:
                continue
            space, marker = yield from source.plain(source.log.text, (*_ENDS, CHANNEL))
            if marker == CHANNEL:
                source.keep(space + marker)
                header = yield from _read_header(source, CHANNEL)
                has_start = yield from _read_body(source, header, bool(tools))
            else:
                has_start = marker == START

    def grammar(self, text: GrammarText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        return either(
            joined(text.spelled(f"{tool.name} {CONSTRAIN}json{MESSAGE}"), text.arguments(tool), text.spelled(CALL))
            for tool in tools
        )

    def free(self, text: GrammarText, call: str, *, parallel: bool) -> str:
        channel, words = text.spelled(CHANNEL), text.rule(ANY_TEXT)
        plain = f"{channel} /analysis|commentary|final/ {text.spelled(MESSAGE)} {words}"
        again = f"{text.spelled(END)} {text.spelled(START + 'assistant')}"
        return f"{text.rule(plain)} ({again} {text.rule(plain)})* ({again} {call})? | {call} | {words}"

    def before_call(self, text: GrammarText) -> str:
        """What may precede a call that is required: after reasoning, the beginning of a new message."""
        return f"({text.spelled(START + 'assistant')})?"

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        messages = [f"{self.trigger}{name} {CONSTRAIN}json{MESSAGE}{arguments}{CALL}" for name, arguments in calls]
        return f"{START}assistant".join(messages)


def _read_message(source: Source, has_start: bool, may_call: bool) -> Reading[tuple[bool, bool]]:
    """Read a whole message. Returns whether there was one, and whether the next one's `<|start|>` has been read."""
    source.keep("")
    yield from source.spaces()
    if has_start or (yield from source.match(START)):
        yield from source.word(_ROLE)
        yield from source.spaces()
    begun = yield from source.match(CHANNEL, "to=")
    if not begun:
        source.give_back()
        return False, False
    header = yield from _read_header(source, begun)
    return header is not None, (yield from _read_body(source, header, may_call))


def _read_header(source: Source, begun: str) -> Reading[str | None]:
    """Read a header to its end. Returns None, with the text given back, if it has none."""
    header, is_whole = yield from source.until(MESSAGE, _MAX_HEADER)
    if not is_whole:
        source.give_back()
        return None
    source.settle()
    return begun + header


def _read_body(source: Source, header: str | None, may_call: bool) -> Reading[bool]:
    """Read a message's body and its end. Returns whether the next message's `<|start|>` has been read."""
    if header is None:
        return False
    log, recipient, channel = source.log, _RECIPIENT.search(header), _CHANNEL.search(header)
    if may_call and recipient is not None and recipient.group(1) not in ("assistant", "user", "all"):
        log.start_call(recipient.group(1))
        yield from source.spaces()
        is_whole = False
        if (yield from source.next_is("{")):
            is_whole = yield from source.span(JsonSpan(), log.arguments)
        log.end_call(is_whole)
        source.keep("")
        yield from source.spaces()
        marker = yield from source.match(*_ENDS)
        source.give_back_unless_blank() if not marker else source.settle()
        return marker == START
    emit = log.reasoning if channel is not None and channel.group(1) == "analysis" else log.text
    _, marker = yield from source.plain(emit, _ENDS)
    return marker == START
