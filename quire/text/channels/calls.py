"""Reads a tool call written as a JSON object, `{"name": …, "arguments": {…}}`, or as a name followed by arguments.

The JSON-based formats share this incremental reader. The text of a possible call is held back until the call is
certain, and is emitted as text if it is no call; once certain, arguments are streamed. A call that breaks off later
ends there, and what follows is text again, so that no output is lost. Where the text was cut (`Source.cut`), the
beginning of a call is never text: with a name it is an incomplete call, without one it is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial

from quire.text.channels.source import MAX_HELD, MAX_NAME, JsonSpan, Reading, Source

ARGUMENT_KEYS = ("arguments", "parameters")
IDLE_KEYS = ("id", "type", "tool_call_id")  # allowed in a call and ignored
_SCALAR = re.compile(r"[0-9a-zA-Z+.\-]")


@dataclass(slots=True)
class _Call:
    name: str | None = None
    arguments: str | None = None  # arguments that preceded the name or were written as a string
    is_started: bool = False
    is_whole: bool = False  # the arguments are complete
    names: Collection[str] | None = None  # names that make a call; None: any name
    is_marked: bool = True
    name_key: str = "name"
    argument_keys: Collection[str] = ARGUMENT_KEYS
    keys: set[str] = field(default_factory=set)


def read_call(
    source: Source,
    *,
    names: Collection[str] | None = None,
    is_marked: bool = True,
    name_key: str = "name",
    argument_keys: Collection[str] = ARGUMENT_KEYS,
) -> Reading[bool]:
    """Read a call from its opening brace, after `source.keep`. Returns False if it was no call; it is then emitted as
    text.

    Without a marker (`is_marked` is false) only an object with a call's own keys, a name in `names` and arguments is a
    call. Ordinary JSON is thus recognised as text at its first key.
    """
    call = _Call(names=names, is_marked=is_marked, name_key=name_key, argument_keys=argument_keys)
    source.take_char()
    is_whole = yield from _read_members(source, call)
    if call.is_started:
        source.log.end_call(call.is_whole)
        source.give_back_unless_blank()
        return True
    if is_whole and call.name is not None and (call.arguments is not None or is_marked):
        source.settle()
        source.log.start_call(call.name)
        source.log.arguments(call.arguments or "{}")
        source.log.end_call()
        return True
    if source.broke_off and call.name is not None:
        _start(source, call)
        source.log.end_call(is_whole=False)
        return True
    source.give_back()
    return False


def read_arguments(source: Source, name: str, *, is_named: bool) -> Reading[bool]:
    """Read the arguments of a call whose name preceded them, from their opening brace. Returns False if it was no call;
    it is then emitted as text. `is_named`: the name is complete, even if the text ends before the arguments."""
    if not name or not ((yield from source.next_is("{")) or (is_named and source.broke_off)):
        source.give_back()
        return False
    source.settle()
    source.log.start_call(name)
    is_whole = yield from source.span(JsonSpan(), source.log.arguments)
    source.log.end_call(is_whole)
    return True


def read_separator(source: Source) -> Reading[bool]:
    """Read the separator between two JSON calls: a comma or semicolon with white space around it. It is dropped if a
    call follows or the text is cut. Returns True if an opening brace follows, with the separator held by
    `source.keep`."""
    source.keep("")
    yield from source.spaces()
    yield from source.match(",", ";")
    yield from source.spaces()
    return (yield from source.next_is("{"))


def read_calls(
    source: Source,
    *,
    names: Collection[str] | None = None,
    is_marked: bool = True,
    name_key: str = "name",
    argument_keys: Collection[str] = ARGUMENT_KEYS,
) -> Reading[bool]:
    """Read a list of calls from its opening bracket. Returns True if it held at least one call."""
    one = partial(read_call, names=names, is_marked=is_marked, name_key=name_key, argument_keys=argument_keys)
    source.take_char()
    any_call = False
    while True:
        yield from source.spaces()
        if not (yield from source.next_is("{")):
            break
        if not (yield from one(source)):
            return any_call
        any_call = True
        source.keep("")
        yield from source.spaces()
        if not (yield from source.match(",")):
            break
    if not any_call:
        source.give_back()
    elif (yield from source.match("]")):
        source.settle()
    else:
        source.give_back_unless_blank()
    return any_call


def _read_members(source: Source, call: _Call) -> Reading[bool]:
    """Read the members and the closing brace. Returns False if the object is broken."""
    while True:
        yield from source.spaces()
        if (yield from source.match("}")):
            break
        if call.keys and not (yield from source.match(",")):
            return False
        yield from source.spaces()
        if not (yield from source.next_is('"')):
            return False
        key = yield from source.string(MAX_NAME)
        if key is None or key in call.keys:
            return False
        call.keys.add(key)
        yield from source.spaces()
        if not (yield from source.match(":")):
            return False
        yield from source.spaces()
        if not (yield from _read_value(source, call, key)) or source.kept_len > MAX_HELD:
            return False
    if call.is_started:
        source.settle()
    return True


def _read_value(source: Source, call: _Call, key: str) -> Reading[bool]:
    if key == call.name_key:
        return (yield from _read_name(source, call))
    if key in call.argument_keys and call.arguments is None and not call.is_started:
        return (yield from _read_arguments(source, call))
    if not call.is_marked and key not in IDLE_KEYS:
        return False
    return (yield from _skip_value(source))


def _read_name(source: Source, call: _Call) -> Reading[bool]:
    if not (yield from source.next_is('"')):
        return False
    name = yield from source.string(MAX_NAME)
    if not name or (call.names is not None and name not in call.names):
        return False
    call.name = name
    if call.arguments is not None:
        _start(source, call)
        source.log.arguments(call.arguments)
        call.is_whole = True
        source.keep("")
    return True


def _read_arguments(source: Source, call: _Call) -> Reading[bool]:
    if (yield from source.next_is("{")):
        if call.name is not None:
            _start(source, call)
            call.is_whole = yield from source.span(JsonSpan(), source.log.arguments)
            source.keep("")
            return call.is_whole
        pieces: list[str] = []
        is_whole = yield from source.span(JsonSpan(), pieces.append)
        call.arguments = "".join(pieces)
        return is_whole
    if (yield from source.next_is('"')):  # some models write the arguments object as a string
        text = yield from source.string(partial=True)
        if text is None or text.strip()[:1] not in ("", "{"):
            return False
        call.arguments = text if text.strip() or source.broke_off else "{}"
    elif (yield from source.match("null")):
        call.arguments = "{}"
    else:
        return False
    if call.name is not None:
        _start(source, call)
        source.log.arguments(call.arguments)
        call.is_whole = not source.broke_off
        source.keep("")
    return True


def _skip_value(source: Source) -> Reading[bool]:
    if (yield from source.next_is("{[")):
        return (yield from source.span(JsonSpan(), None))
    if (yield from source.next_is('"')):
        return (yield from source.string()) is not None
    return bool((yield from source.word(_SCALAR)))


def _start(source: Source, call: _Call) -> None:
    source.settle()
    assert call.name is not None
    source.log.start_call(call.name)
    call.is_started = True
