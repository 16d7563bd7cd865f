"""Reads the layout of tool calls off the probes: what stands before a name, around arguments and between calls.

A layout is returned only if it parses the probe's own text back into the calls that were rendered; otherwise the
template's format is one of the hand-written ones, or unknown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.text.channels.events import ToolCallDelta, ToolCallStart, ToolSpec
from quire.text.channels.formats.seam import ToolFormat
from quire.text.channels.layouts import JsonCalls, Layout, NamedCalls
from quire.text.channels.layouts.pieces import ID, INDEX, NAME, common_prefix, common_suffix, is_marker, split
from quire.text.channels.parser import make_channel_parser
from quire.text.channels.probe.frames import make_frame, numbered, slotted
from quire.text.channels.probe.tagged import read_tagged
from quire.text.channels.probe.views import ANSWER, ARGUMENTS, CALL_IDS, FIRST, KEYS, SECOND, THIRD, VALUES, ProbeViews
from quire.text.channels.reasoning import AnswerMarkers, ReasoningStyle

_NAME_KEYS = ("name", "tool_name", "function", "tool")


@dataclass(slots=True)
class CallTexts:
    """The probe's texts from the end of the generation prompt to the end of the turn."""

    one: str  # one call with two arguments
    two: str | None  # two such calls; None: the template writes only one
    empty: str | None  # a call without arguments


def read_call_layout(views: ProbeViews, style: ReasoningStyle | None, answer: AnswerMarkers) -> Layout | None:
    """The layout of a template's calls, or None if it writes none or they follow no layout."""
    if not views.choose_form():
        return None
    texts = _call_texts(views, style, answer)
    if texts is None:
        return None
    views.is_single = texts.two is None
    for read in (_read_json, _read_named):
        found = read(texts)
        if found is not None and reads_back(found, texts):
            return found
    tagged = read_tagged(texts.one, texts.two, texts.empty, lambda value: _typed_text(views, value, texts.one))
    return tagged if tagged is not None and reads_back(tagged, texts) else None


def reads_back(found: ToolFormat, texts: CallTexts) -> bool:
    """Whether a format parses what the template writes."""
    wanted = [(texts.one, [(FIRST, dict(ARGUMENTS))])]
    if texts.two is not None:
        wanted.append((texts.two, [(FIRST, dict(ARGUMENTS)), (SECOND, dict(ARGUMENTS))]))
    if texts.empty is not None:
        wanted.append((texts.empty, [(THIRD, {})]))
    return all(parsed_calls(found, text.replace(ID, CALL_IDS[0])) == calls for text, calls in wanted)


def parsed_calls(found: ToolFormat, text: str) -> list[tuple[str, Any]] | None:
    """The calls of a text, or None if text remains or arguments are not JSON."""
    parser = make_channel_parser(found, tools=_SPECS)
    message: list[tuple[str, str]] = []
    for event in [*parser.push(text), *parser.finish()]:
        if isinstance(event, ToolCallStart):
            message.append((event.name, ""))
        elif isinstance(event, ToolCallDelta):
            name, arguments = message[event.index]
            message[event.index] = (name, arguments + event.arguments)
    try:
        return [(name, json.loads(arguments)) for name, arguments in message]
    except ValueError:
        return None


_SPECS = tuple(
    ToolSpec(name, {"type": "object", "properties": {key: {"type": "string"} for key in keys}})
    for name, keys in ((FIRST, KEYS), (SECOND, KEYS), (THIRD, ()))
)


def _call_texts(views: ProbeViews, style: ReasoningStyle | None, answer: AnswerMarkers) -> CallTexts | None:
    one = views.calls((FIRST, ARGUMENTS))
    two = views.calls((FIRST, ARGUMENTS), (SECOND, ARGUMENTS))
    empty = views.calls((THIRD, {}))
    said = views.answer() or ""
    if one is None:
        return None
    prompt = views.prompt() or ""
    begun = prompt if prompt and one.startswith(prompt) else common_prefix(one, said) if said else ""
    end = said.partition(ANSWER)[2]
    turn_end = next(iter(split(end.lstrip())), "")
    turn_end = turn_end if is_marker(turn_end) and turn_end not in (answer.close or "") else ""

    def turn(text: str | None, name: str) -> str | None:
        if text is None or name not in text or not text.startswith(begun):
            return None
        text = text[len(begun) : len(text) - len(common_suffix(text, end))]
        if turn_end and text.rfind(turn_end) > max(text.rfind(part) for part in (name, *VALUES)):
            text = text[: text.rindex(turn_end)].rstrip("\n")
        for marker, call_id in zip((ID,) * 3, CALL_IDS, strict=True):
            text = text.replace(call_id, marker)
        return _without_beginning(text, style, answer)

    mine = turn(one, FIRST)
    return None if mine is None else CallTexts(mine, turn(two, SECOND), turn(empty, THIRD))


def _without_beginning(text: str, style: ReasoningStyle | None, answer: AnswerMarkers) -> str:
    """The text without empty reasoning and an empty answer before the calls."""
    before, found, after = text.partition(style.close) if style else ("", "", "")
    if found and style and before.strip() in ("", style.open.strip()):
        text = after
    for marker in (answer.open.strip(), answer.close.strip()):
        if marker and text.lstrip().startswith(marker):
            text = text.lstrip()[len(marker) :]
    return text


# -- objects in JSON


def _read_json(texts: CallTexts) -> JsonCalls | None:
    first = _object_with(texts.one, FIRST)
    if first is None:
        return None
    start, end, found = first
    name_key = next((key for key, value in found.items() if value == FIRST), "")
    arguments_key = next((key for key, value in found.items() if _is_arguments(value)), "")
    name_at = texts.one.index(FIRST, start)
    arguments = _arguments_after(texts.one, name_at)
    if not arguments_key or arguments is None or (not name_key and list(found) != [FIRST]):
        return None
    parts = [texts.one[start:name_at], texts.one[name_at + len(FIRST) : arguments[0]], texts.one[arguments[1] : end]]
    second = _object_with(texts.two, SECOND) if texts.two is not None else None
    between, after = None, texts.one[end:]
    if texts.two is not None and second is not None:
        one = _object_with(texts.two, FIRST)
        assert one is not None
        between, after = texts.two[one[1] : second[0]], texts.two[second[1] :]
        other = texts.two[second[0] : texts.two.index(SECOND, second[0])]
        parts[0] = slotted(parts[0], other)
    frame = make_frame(texts.one[:start], between, after)
    is_list = frame.opening.rstrip().endswith("[")
    key = arguments_key if name_key else ""
    return JsonCalls("template", frame, name_key, key or "arguments", parts[0], parts[1], parts[2], is_list=is_list)


def _object_with(text: str, name: str) -> tuple[int, int, dict[str, Any]] | None:
    """The innermost JSON object that holds a name: its bounds and value."""
    at = text.find(name)
    start = text.rfind("{", 0, at) if at >= 0 else -1
    decoder = json.JSONDecoder()
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except ValueError:
            value, end = None, 0
        if isinstance(value, dict) and (name in value or name in value.values()):
            return start, end, value
        start = text.rfind("{", 0, start)
    return None


def _is_arguments(value: Any) -> bool:
    return value == ARGUMENTS or (isinstance(value, str) and value == json.dumps(ARGUMENTS))


def _arguments_after(text: str, at: int) -> tuple[int, int] | None:
    """The bounds of the first JSON object after a position that is the probe's arguments."""
    start = text.find("{", at)
    while start >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            return None
        if value == ARGUMENTS:
            return start, end
        start = text.find("{", start + 1)
    return None


# -- a name, then JSON


def _read_named(texts: CallTexts) -> NamedCalls | None:
    bounds = _named_bounds(texts.one, FIRST)
    if bounds is None:
        return None
    name_at, start, end = bounds
    mid = texts.one[name_at + len(FIRST) : start]
    after = texts.one[end:]
    between, before = None, texts.one[:name_at].replace(FIRST, NAME)
    if texts.two is not None:
        one, other = _named_bounds(texts.two, FIRST), _named_bounds(texts.two, SECOND)
        if one is None or other is None:
            return None
        between = texts.two[one[2] : other[0]].replace(SECOND, NAME)
        after = texts.two[other[2] :]
        mid = slotted(mid, texts.two[other[0] + len(SECOND) : other[1]])
        between, before = numbered(between, before)
    frame = make_frame(before, between, after)
    slot = max(mid.rfind(ID), mid.rfind(INDEX)) + 1
    if not frame.opening.strip():
        return None
    return NamedCalls("template", frame, mid[slot:], mid[:slot], writes_id=slot > 0)


def _named_bounds(text: str, name: str) -> tuple[int, int, int] | None:
    """Where a name and its arguments stand: the name, the start and the end of the arguments."""
    arguments = _arguments_after(text, text.find(name)) if name in text else None
    if arguments is None:
        return None
    name_at = text.rfind(name, 0, arguments[0])
    return (name_at, *arguments) if name_at >= 0 else None


def _typed_text(views: ProbeViews, value: Any, like: str) -> str | None:
    """The text of a call whose only argument is this value, cut like the text of the first probe."""
    arguments: Mapping[str, Any] = {KEYS[0]: value}
    text = views.calls((FIRST, arguments))
    start = like[: like.index(KEYS[0])].replace(ID, CALL_IDS[0])
    if text is None or start not in text:
        return None
    return text[text.index(start) + len(start) :]
