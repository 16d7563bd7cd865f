"""Reads the markers of reasoning, and of the answer after it, off the probes."""

from __future__ import annotations

from typing import Any

from quire.text.channels.layouts.pieces import common_prefix, common_suffix, is_marker, split
from quire.text.channels.probe.views import ANSWER, ARGUMENTS, FIRST, THOUGHT, ProbeViews
from quire.text.channels.reasoning import STYLES, AnswerMarkers, ReasoningStyle, choose_reasoning

THINKS: dict[str, Any] = {
    "enable_thinking": True,
    "thinking": True,
}  # the variables that switch reasoning on in most templates


def read_reasoning(views: ProbeViews, source: str) -> tuple[ReasoningStyle | None, AnswerMarkers, str]:
    """The markers of reasoning and answer, and how they were found."""
    prompt = views.prompt(**THINKS) or ""
    said = views.answer() or ""
    answer = _answer_markers(views, prompt, said)
    found = _between_markers(views, prompt, said)
    if found is None:
        style = choose_reasoning(source) or next((s for s in STYLES if prompt.rstrip().endswith(s.open)), None)
        return style, answer, "markers in the template's source" if style else "none"
    style, opening = found
    return style, AnswerMarkers(opening or answer.open, answer.close), "rendered reasoning"


def _between_markers(views: ProbeViews, prompt: str, said: str) -> tuple[ReasoningStyle, str] | None:
    """The markers around rendered reasoning, and what opens the answer after them."""
    text = views.answer(THOUGHT, **THINKS)
    views.choose_form()
    calls = views.calls((FIRST, ARGUMENTS), thought=THOUGHT, **THINKS)
    after = _from_thought(text, ANSWER)
    before = ((text if after is not None else calls) or "").partition(THOUGHT)[0]
    after_with_calls = _from_thought(calls, FIRST)
    if after is None and after_with_calls is None:
        return None
    if after is None or not after.strip():
        plain = views.calls((FIRST, ARGUMENTS), **THINKS) or ""
        own = plain.partition(FIRST)[0]
        rest = after_with_calls or ""
        after = rest[: len(rest) - len(common_suffix(rest, own))]
        after_with_calls = None
    close, opening = after, ""
    if after_with_calls is not None and THOUGHT in (calls or ""):
        shared = common_prefix(after, after_with_calls)
        if shared.strip():
            shared = _to_turn_begin(shared, prompt)
            close, opening = shared, after[len(shared) :]
    close = close.strip()
    if not close:
        return None
    known = next((style for style in STYLES if close.startswith(style.close)), None)
    if known is not None and known.open in before:
        return known, (close[len(known.close) :] + opening).strip()
    opened = _opening(before, prompt, said, close)
    return (ReasoningStyle("read", opened, close), opening.strip()) if opened else None


def _to_turn_begin(close: str, prompt: str) -> str:
    """The text up to the beginning of the model's next message, as the generation prompt writes it, if it is there."""
    pieces = split(prompt)
    for at in range(len(pieces) - 1):
        begin = "".join(pieces[at:])
        if is_marker(pieces[at]) and begin in close:
            return close[: close.index(begin) + len(begin)]
    return close


def _from_thought(text: str | None, until: str) -> str | None:
    """The text between the rendered thought and what follows it."""
    if text is None or THOUGHT not in text or until not in text.partition(THOUGHT)[2]:
        return None
    return text.partition(THOUGHT)[2].partition(until)[0]


def _opening(before: str, prompt: str, said: str, close: str) -> str:
    """The marker before the reasoning."""
    if prompt and before.startswith(prompt) and before[len(prompt) :].strip():
        return before[len(prompt) :].strip()
    usual = said.partition(ANSWER)[0]
    for header in (usual, prompt):
        rest = before[len(common_prefix(before, header)) :] if header else ""
        if rest.strip():
            return rest.strip()
    rest = prompt[len(before) :].strip() if prompt.startswith(before) else ""
    if rest and not rest.startswith(close):
        return rest
    num_pieces = len(split(close))
    return "".join(split(before.rstrip())[-num_pieces:]).strip()


def _answer_markers(views: ProbeViews, prompt: str, said: str) -> AnswerMarkers:
    """Markers that stand around an answer but not around calls."""
    before, _, after = said.partition(ANSWER)
    calls = views.calls((FIRST, ARGUMENTS)) or ""
    if not prompt or not before.startswith(prompt):
        prompt = common_prefix(before, calls) if calls else before
    opened = before[len(prompt) :].strip()
    for style in STYLES:  # an empty reasoning before the answer is no marker of it
        opened = opened.rpartition(style.close)[2].strip()
    if not any(map(is_marker, split(opened))):
        return AnswerMarkers()
    close = after[: len(after) - len(common_suffix(after, calls))].strip() if calls else ""
    return AnswerMarkers(opened, close if any(map(is_marker, split(close))) else "")
