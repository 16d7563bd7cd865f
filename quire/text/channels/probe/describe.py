"""Describes a chat template: probes it, and chooses the formats in which its model writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from quire.text.channels.formats import FORMATS, HAND_WRITTEN
from quire.text.channels.formats.presets import PRESETS
from quire.text.channels.formats.seam import ToolFormat
from quire.text.channels.layouts import Layout
from quire.text.channels.probe.calls import read_call_layout
from quire.text.channels.probe.replay import Replay
from quire.text.channels.probe.result import TemplateFormats
from quire.text.channels.probe.thoughts import THINKS, read_reasoning
from quire.text.channels.probe.views import (
    ANSWER,
    ARGUMENTS,
    FIRST,
    MAX_SECONDS,
    REASONING_KEYS,
    THOUGHT,
    ProbeViews,
    Render,
    probe_content_beside,
    probe_result_shown,
    probe_system_shown,
)
from quire.text.channels.reasoning import AnswerMarkers, ReasoningStyle


def describe_template(
    render: Render, source: str, configured: str | None = None, *, clock: Callable[[], float] = time.thread_time
) -> TemplateFormats:
    """The formats that a template teaches. `configured` names a format of calls that is used instead of the template's;
    "none" leaves calls as text."""
    until = clock() + MAX_SECONDS
    views = ProbeViews(render, lambda: clock() > until)
    style, answer, how = read_reasoning(views, source)
    found = read_call_layout(views, style, answer)
    shows_calls = found is not None or views.choose_form()
    notes = [_reasoning_note(style, answer, how)]
    tools: ToolFormat | None = _with_known_name(found)
    why = "read off a rendered conversation"
    if configured is not None:
        tools, why = (FORMATS[configured] if configured != "none" else None), "configured"
    else:
        written = next((one for one in HAND_WRITTEN if one.is_taught_by(source, found)), None)
        if written is not None:
            tools, why = written, "a known format whose marks are in the template"
            style, answer = written.style or style, written.answer or answer
            notes = [_reasoning_note(style, answer, "known format" if written.style else how)]
    reads_all = configured is None and any(tools is one and one.frames_text for one in HAND_WRITTEN)
    if tools is None and configured is None:
        tools, why = _unshown(views, source)
    is_generic = not views.has_tools and configured != "none" and tools is not None
    notes.insert(0, "tool calls: " + (f"{tools.description!r}, {why}" if tools else "stay text, " + why))
    if not views.has_tools:
        notes.append(f"tools: the template has no place for them{'; a message describes them' if is_generic else ''}")
    key = _reasoning_key(views)
    replay = Replay(
        views.form,
        key,
        shows_calls,
        not is_generic,
        probe_result_shown(views),
        probe_system_shown(views),
        probe_content_beside(views, key),
        views.tool_variable or "tools",
    )
    return TemplateFormats(tools, style, answer, replay, reads_all, is_generic, tuple(notes))


def _unshown(views: ProbeViews, source: str) -> tuple[ToolFormat, str]:
    """The format of a template that renders no calls."""
    if not views.has_tools:
        return FORMATS["hermes"], "the generic format"
    if "<tool_call>" in source:
        return FORMATS["hermes"], "its marker is in the template, which shows no calls"
    return FORMATS["json"], "the template shows tools but no calls"


def _with_known_name(found: Layout | None) -> Layout | None:
    """The layout, with the name of the preset that has the same markers."""
    for preset in PRESETS:
        if found is not None and type(found) is type(preset) and _same_markers(found, preset):
            return replace(found, name=preset.name)
    return found


def _same_markers(one: Layout, other: Layout) -> bool:
    return [text.strip() for text in one.markers] == [text.strip() for text in other.markers]


def _reasoning_note(style: ReasoningStyle | None, answer: AnswerMarkers, how: str) -> str:
    text = f"reasoning: {style.open!r} … {style.close!r}, {how}" if style else "reasoning: none"
    return text + (f"; answer: {answer.open!r} … {answer.close!r}" if answer != AnswerMarkers() else "")


def _reasoning_key(views: ProbeViews) -> str | None:
    """The field of a message whose reasoning the template shows."""
    for key in REASONING_KEYS:
        message = {"role": "assistant", "content": "", key: THOUGHT}
        for text in (
            views.tail({**message, "content": ANSWER}, **THINKS),
            views.calls_with({key: THOUGHT}, (FIRST, ARGUMENTS), **THINKS),
        ):
            if text is not None and THOUGHT in text:
                return key
    return None
