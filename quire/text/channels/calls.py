"""A tool call written as a JSON object, `{"name": …, "arguments": {…}}`, or as a name and then arguments, read while it
arrives.

The JSON-based formats share this. Until a call is certain its text is kept back, and given back as text if it turns out
to be none; from then on the arguments go out as they come. A call that breaks off later is ended where it broke, and
what follows is text again: whatever the model wrote shows up somewhere. Only where the text was cut in mid-course
(`Source.cut`) the beginning of a call is no text: with its name it is a call that is not whole, without it is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from quire.text.channels.source import MAX_HELD, MAX_NAME, JsonSpan, Reading, Source

ARGUMENT_KEYS = ("arguments", "parameters")
IDLE_KEYS = ("id", "type")  # may stand in a call and say nothing we need
_SCALAR = re.compile(r"[0-9a-zA-Z+.\-]")


@dataclass(slots=True)
class _Call:
    name: str | None = None
    arguments: str | None = None  # came before the name, or as a string
    is_started: bool = False
    is_whole: bool = False  # the arguments came to their end
    names: Collection[str] | None = None  # only these; None: any
    is_marked: bool = True
    keys: set[str] = field(default_factory=set)


def read_call(source: Source, *, names: Collection[str] | None = None, is_marked: bool = True) -> Reading[bool]:
    """Read a call from its opening brace; `source.keep` was called before. False: it was none, and is text now.

    Where no marker announced it (`is_marked` is false), only an object with nothing but a call's own keys, a name out
    of `names` and arguments is one; so ordinary JSON is known as text by its first key.
    """
    call = _Call(names=names, is_marked=is_marked)
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
    """A call's arguments where its name came before them, from their opening brace. False: it was none, and is text.
    `is_named`: what followed the name shows that it is whole, even if the text breaks off before the arguments."""
    if not name or not ((yield from source.next_is("{")) or (is_named and source.broke_off)):
        source.give_back()
        return False
    source.settle()
    source.log.start_call(name)
    is_whole = yield from source.span(JsonSpan(), source.log.arguments)
    source.log.end_call(is_whole)
    return True


def read_separator(source: Source) -> Reading[bool]:
    """What models write between two calls in JSON: a comma or a semicolon, with white space around it. It is framing
    if a call follows, or the text is cut. True: an opening brace follows; then `source.keep` was called before."""
    source.keep("")
    yield from source.spaces()
    yield from source.match(",", ";")
    yield from source.spaces()
    return (yield from source.next_is("{"))


def read_calls(source: Source, *, names: Collection[str] | None = None, is_marked: bool = True) -> Reading[bool]:
    """The same for a list of calls, from its opening bracket. True if there was at least one."""
    source.take_char()
    any_call = False
    while True:
        yield from source.spaces()
        if not (yield from source.next_is("{")):
            break
        if not (yield from read_call(source, names=names, is_marked=is_marked)):
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
    """The members up to and with the closing brace. False: broken off."""
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
    if key == "name":
        return (yield from _read_name(source, call))
    if key in ARGUMENT_KEYS and call.arguments is None and not call.is_started:
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
    if (yield from source.next_is('"')):  # some models write the object as a string
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
