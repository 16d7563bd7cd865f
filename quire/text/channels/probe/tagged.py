"""Reads the layout of calls whose arguments stand between markers of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.text.channels.layouts import CallFrame, TaggedCalls
from quire.text.channels.layouts.pieces import INDEX, KEY, NAME, common_prefix, common_suffix
from quire.text.channels.probe.frames import make_frame, numbered, slotted
from quire.text.channels.probe.views import FIRST, KEYS, SECOND, THIRD, VALUES

# One value of each JSON type, and the texts that templates write for it.
_TYPED: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("string", "qxtextq", ("qxtextq",)),
    ("integer", 7341, ("7341",)),
    ("boolean", True, ("true", "True")),
    ("array", [7342], ("[7342]",)),
    ("object", {"qxin": 1}, ('{"qxin": 1}', '{"qxin":1}', "{'qxin': 1}")),
    ("null", None, ("null", "None", "")),
)


def read_tagged(one: str, two: str | None, empty: str | None, typed: Callable[[Any], str | None]) -> TaggedCalls | None:
    """The layout of one call, two calls and a call without arguments, or None. `typed` gives the text from the key on
    of a call whose only argument is a value."""
    places = [one.find(part) for part in (KEYS[0], VALUES[0], KEYS[1], VALUES[1])]
    if -1 in places or places != sorted(places):
        return None
    name_at = one.rfind(FIRST, 0, places[0])
    if name_at < 0:
        return None
    to_key = one[name_at + len(FIRST) : places[0]]
    if two is not None and SECOND in two:
        at = two.rfind(SECOND, 0, two.rfind(KEYS[0]))
        to_key = slotted(to_key, two[at + len(SECOND) : two.rfind(KEYS[0])])
    opens = [one[places[i] + len(KEYS[i // 2]) : places[i + 1]] for i in (0, 2)]
    to_next = one[places[1] + len(VALUES[0]) : places[2]].replace(KEYS[0], KEY)
    after = one[places[3] + len(VALUES[1]) :].replace(KEYS[1], KEY)
    if opens[0] != opens[1]:
        return None
    key_open = common_suffix(to_key, to_next)
    close = common_prefix(to_next[: len(to_next) - len(key_open)], after)
    if not key_open.strip() or not close.strip():
        return None
    after_name = to_key[: len(to_key) - len(key_open)]
    ending = after[len(close) :]
    before = one[:name_at].replace(FIRST, NAME)
    frame, end = _frame(before, two, ending, close)
    found = TaggedCalls(
        "template",
        frame,
        after_name,
        key_open,
        opens[0],
        close,
        between_arguments=to_next[len(close) : len(to_next) - len(key_open)],
        end=end,
        typed_opens=_typed_opens(typed, close),
        has_cdata="<![CDATA[" in (typed('qx<q>"&') or ""),
        empty=_empty(empty, frame, before, after_name + end),
    )
    return found if frame.opening.strip() else None


def _frame(before: str, two: str | None, ending: str, close: str) -> tuple[CallFrame, str]:
    """The frame of the calls, and what ends a call's arguments."""
    if two is None:
        return CallFrame(open=before, close=ending, is_single=True), ""
    last = two.find(VALUES[1])
    name = two.rfind(SECOND, 0, two.rfind(KEYS[0]))
    shared = close.replace(KEY, KEYS[1])
    between = two[last + len(VALUES[1]) + len(shared) : name].replace(SECOND, NAME)
    between, before = numbered(between, before)
    return make_frame(before, between, ending), ""


def _empty(text: str | None, frame: CallFrame, before: str, usual: str) -> str | None:
    """What follows the name of a call without arguments, where it is not what a call with arguments has around them."""
    if text is None:
        return None
    at = text.rfind(THIRD)
    rest = text[at + len(THIRD) :]
    ending = frame.close + frame.section_close
    if ending and rest.endswith(ending):
        rest = rest[: len(rest) - len(ending)]
    return None if rest in (usual, usual.replace(INDEX, "0"), usual.replace(INDEX, "1")) else rest


def _typed_opens(typed: Callable[[Any], str | None], close: str) -> tuple[tuple[str, str], ...]:
    """The text between key and value by the value's type, where the types differ."""
    found: dict[str, str] = {}
    for kind, value, spellings in _TYPED:
        text = typed(value)
        if text is None or not text.startswith(KEYS[0]):
            continue
        until = text.find(close.replace(KEY, KEYS[0]))
        body = text[len(KEYS[0]) : until] if until >= 0 else ""
        spelling = next((one for one in spellings if body.endswith(one) and len(body) > len(one)), None)
        if spelling is not None:
            found[kind] = body[: len(body) - len(spelling)]
    if "string" not in found or len(set(found.values())) == 1:
        return ()
    return tuple(found.items())
