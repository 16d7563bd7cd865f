"""Llama 3: `{"name": …, "parameters": {…}}`, bare or after `<|python_tag|>`, several separated by `;`. Built-in
tools use `<|python_tag|>name.call(key="value")`. Other code after the tag stays text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from quire.text.channels.calls import read_call, read_separator
from quire.text.channels.events import ToolSpec
from quire.text.channels.formats.seam import ToolFormat
from quire.text.channels.grammar_text import GrammarText, either, json_or_text
from quire.text.channels.source import MAX_HELD, Reading, Source

TAG = "<|python_tag|>"
_IDENTIFIER = re.compile(r"[A-Za-z0-9_]")
_DOTTED = re.compile(r"[A-Za-z0-9_.]")
_SCALAR = re.compile(r"[0-9A-Za-z+.\-]")
_LITERALS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


class Llama3:
    """Implements `ToolFormat`."""

    name = "llama3"
    markers: tuple[str, ...] = (TAG,)
    trigger = ""
    frames_text = False
    plain_key = "parameters"
    repeats = False
    style = None
    answer = None
    description = '{"name": "⟨name⟩", "parameters": ⟨arguments⟩}'

    def free(self, text: GrammarText, call: str, *, parallel: bool) -> str:
        return json_or_text(text, call)

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        return "; ".join(f'{{"name": {json.dumps(name)}, "parameters": {arguments}}}' for name, arguments in calls)

    def is_taught_by(self, template: str, found: ToolFormat | None) -> bool:
        is_bare = found is not None and found.plain_key == "parameters"
        return is_bare or (found is None and TAG in template and '"parameters"' in template)

    def read(self, source: Source, tools: Sequence[ToolSpec]) -> Reading[None]:
        names = frozenset(tool.name for tool in tools) or None
        source.keep("", may_be_text=True)
        yield from source.spaces()
        if (yield from source.next_is("{")):
            yield from _objects(source, names, is_marked=False)
        else:
            source.give_back()
        while True:
            space, marker = yield from source.plain(source.log.text, (TAG,))
            if not marker:
                return
            source.keep(space + marker)
            yield from source.spaces()
            if (yield from source.next_is("{")):
                yield from _objects(source, None, is_marked=True)
            else:
                yield from _built_in(source)

    def grammar(self, text: GrammarText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        call = text.rule(either(text.json_call(tool, "parameters") for tool in tools))
        return f'{call} ("; " {call})*' if parallel else call


def _objects(source: Source, names: frozenset[str] | None, *, is_marked: bool) -> Reading[None]:
    """Read one call, and further calls after separators."""
    while (yield from read_call(source, names=names, is_marked=is_marked)):
        if not (yield from read_separator(source)):
            source.give_back_unless_blank()
            return


def _built_in(source: Source) -> Reading[None]:
    name = yield from source.word(_DOTTED)
    arguments: dict[str, Any] = {}
    if name.endswith(".call") and len(name) > 5 and (yield from source.match("(")):
        is_whole = yield from _keywords(source, arguments)
        if is_whole:
            source.settle()
            source.log.start_call(name.removesuffix(".call"))
            source.log.arguments(json.dumps(arguments, ensure_ascii=False))
            source.log.end_call()
            yield from source.spaces()
            return
    source.give_back()


def _keywords(source: Source, arguments: dict[str, Any]) -> Reading[bool]:
    """Parse `key="value", other=1)` into `arguments`. Returns False for anything else."""
    while not (yield from source.match(")")):
        if arguments and not (yield from source.match(",")):
            return False
        yield from source.spaces()
        key = yield from source.word(_IDENTIFIER)
        if not key or not (yield from source.match("=")):
            return False
        if (yield from source.next_is('"')):
            text = yield from source.string()
            if text is None:
                return False
            arguments[key] = text
        else:
            word = yield from source.word(_SCALAR)
            try:
                arguments[key] = _LITERALS[word] if word in _LITERALS else json.loads(word)
            except ValueError:
                return False
        yield from source.spaces()
        if source.kept_len > MAX_HELD:
            return False
    return True
