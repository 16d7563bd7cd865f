"""Calls with each argument between markers of its own: `<parameter=key>value</parameter>`, the value unquoted.

Qwen3-Coder, GLM, MiniMax M2 and M3, DeepSeek's DSML, Seed, Kimi K3, Hunyuan and Laguna write them. `values` says how
a value's type is known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from quire.text.channels.events import ToolSpec
from quire.text.channels.grammar_text import GrammarText, calls_in_text, either, joined, literal, owner
from quire.text.channels.layouts.frame import CallFrame
from quire.text.channels.layouts.pieces import ID, INDEX, KEY, NAME, expect, expect_after, expect_any, head, shown
from quire.text.channels.layouts.values import properties_of, read_value, type_of, types_of
from quire.text.channels.source import Reading, Source

_KEY = re.compile(r"[^<>\s\"\]|]")


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """A layout whose calls are a name and marked arguments."""

    name: str
    frame: CallFrame
    after_name: str  # between the name and the first argument, or the end of the call
    key_open: str
    value_open: str  # between key and value
    value_close: str
    between_arguments: str = ""  # after the close of each argument but the last; optional white space
    end: str = ""  # after the last argument
    typed_opens: tuple[tuple[str, str], ...] = ()  # JSON type and its `value_open`, where the types differ
    has_cdata: bool = False  # strings may stand in `<![CDATA[…]]>`
    empty: str | None = None  # the whole call after its name if it has no arguments; None: after_name + end

    frames_text: ClassVar[bool] = False
    plain_key: ClassVar[str] = ""

    @property
    def markers(self) -> tuple[str, ...]:
        frame, opens = self.frame, [text for _, text in self.typed_opens]
        own = (self.after_name, self.key_open, self.value_open, self.value_close, self.end, *opens)
        return (frame.section_open, frame.open, *own, frame.close, frame.section_close)

    @property
    def trigger(self) -> str:
        return self.frame.trigger

    @property
    def repeats(self) -> bool:
        return not self.frame.section_open and not self.frame.is_single

    @property
    def description(self) -> str:
        argument = f"{self.key_open}⟨key⟩{self.value_open}⟨value⟩{self.value_close}"
        frame = self.frame
        call = f"{frame.opening}⟨name⟩{self.after_name}{argument}…{self.end}{frame.close}{frame.section_close}"
        return shown(call)

    # -- parsing

    def read(self, source: Source, tools: Sequence[ToolSpec]) -> Reading[None]:
        schemas = {tool.name: tool.parameters for tool in tools}
        while True:
            space, marker = yield from source.plain(source.log.text, self.frame.triggers)
            if not marker:
                return
            source.keep(space + marker)
            if not (yield from self.frame.read_opening(source, marker)):
                source.give_back()
                continue
            if (yield from self._read_call(source, schemas)):
                yield from self.frame.read_close(source)
                yield from source.spaces()

    def _read_call(self, source: Source, schemas: Mapping[str, Mapping[str, Any]]) -> Reading[bool]:
        """Read a call from its name. If it breaks off, the part read stays a call and the rest is text."""
        yield from source.spaces()
        name = yield from source.word(self._name_pattern)
        if not name or (self.after_name.strip() and not (yield from expect(source, self.after_name))):
            source.give_back()
            return False
        if not self.after_name.strip() and not (yield from self._follows(source)):
            source.give_back()
            return False
        source.settle()
        log = source.log
        log.start_call(name)
        log.arguments("{")
        properties = properties_of(schemas.get(name, {}))
        keys: set[str] = set()
        is_whole = False
        while True:
            source.keep("")
            yield from source.spaces()
            if (yield from self._read_end(source)):
                is_whole = True
                break
            key = yield from self._read_key(source)
            if not key or key in keys:
                break
            announced = yield from self._read_value_open(source, key)
            if announced is None:
                break
            source.settle()
            log.arguments(f"{', ' if keys else ''}{json.dumps(key, ensure_ascii=False)}: ")
            keys.add(key)
            types = announced or types_of(properties.get(key, {"type": "string"}))
            if self.value_open.endswith("\n"):
                yield from source.match("\n")
            close = self.value_close.replace(KEY, key)
            if not (
                yield from read_value(
                    source, types, close.strip(), trims=close.startswith("\n"), has_cdata=self.has_cdata
                )
            ):
                log.end_call(is_whole=False)  # the text ended inside the value
                return True
        if is_whole or (yield from source.more()):
            log.arguments("}")
        if is_whole:
            source.settle()
        log.end_call(is_whole=is_whole)
        source.give_back_unless_blank()
        return True

    def _follows(self, source: Source) -> Reading[bool]:
        """Whether the name, which no marker ends, is followed by an argument or the end of the call."""
        firsts = {text.strip()[:1] for text in (self.key_open, self._closing)}
        yield from source.spaces()
        return (yield from source.next_is("".join(firsts))) or source.broke_off

    @property
    def _closing(self) -> str:
        """The text that ends a call's arguments."""
        return self.end if self.end.strip() else self.frame.close or self.frame.section_close

    @property
    def _name_pattern(self) -> re.Pattern[str]:
        ends = "".join({text.strip()[:1] for text in (self.after_name, self.key_open, self._closing)} | {"<"})
        return re.compile(rf"[^\s>\"{re.escape(ends)}]")

    def _read_end(self, source: Source) -> Reading[bool]:
        """Read the end of the arguments. Where the frame's text ends them, it is read here."""
        closing = self._closing
        begun = head(closing)
        if not (yield from source.match(begun)):
            return False
        return (yield from expect_after(source, begun, closing))

    def _read_key(self, source: Source) -> Reading[str]:
        begun = head(self.key_open)
        if not (yield from source.match(begun)) or not (yield from expect_after(source, begun, self.key_open)):
            return ""
        yield from source.spaces()
        return (yield from source.word(_KEY))

    def _read_value_open(self, source: Source, key: str) -> Reading[frozenset[str] | None]:
        """Read the text between key and value. Returns the type it announces, empty if none; None if it is missing."""
        if not self.typed_opens:
            is_there = yield from expect(source, self.value_open.replace(KEY, key))
            return frozenset() if is_there else None
        texts = {
            text: frozenset(kind for kind, other in self.typed_opens if other == text) for _, text in self.typed_opens
        }
        found = yield from expect_any(source, tuple(texts))
        if found is None:
            return None
        return frozenset(["string"]) if "string" in texts[found] else frozenset(texts[found])

    # -- grammar

    def grammar(self, text: GrammarText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        frame = self.frame

        def one(begin: str) -> str:
            return either(self._call_grammar(text, tool, begin.replace(NAME, tool.name)) for tool in tools)

        opened = frame.opening.partition(self.trigger)[2]
        if self.repeats:
            return joined(one(opened), text.spelled(frame.close))
        first = text.rule(one(opened))
        again = text.rule(one(frame.close + frame.between + frame.open))
        calls = f"{first} {again}*" if parallel and not frame.is_single else first
        return joined(calls, text.spelled(frame.close + frame.section_close))

    def _call_grammar(self, text: GrammarText, tool: ToolSpec, begin: str) -> str:
        properties = properties_of(tool.parameters)
        if not properties and self.empty is not None:
            return text.spelled(begin + tool.name + self.empty)
        required, parts = tool.parameters.get("required", ()), []
        for key, schema in properties.items():
            part = joined(text.spelled(self.key_open + key), self._value_grammar(text, key, schema, tool))
            parts.append(part if key in required else f"({part})?")
        return joined(text.spelled(begin + tool.name + self.after_name), *parts, text.spelled(self.end))

    def _value_grammar(self, text: GrammarText, key: str, schema: Any, tool: ToolSpec) -> str:
        """The grammar of a value with the texts before and after it."""
        types, spelled = types_of(schema), text.spelled
        close = self.value_close.replace(KEY, key) + self.between_arguments
        if types == {"string"}:
            begin = spelled(self._open_for("string", key))
            if isinstance(schema.get("enum"), list):
                return joined(begin, either(literal(str(value)) for value in schema["enum"]), spelled(close))
            return joined(begin, text.string(schema, close))
        shared = {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}
        whole = {**shared, **schema} if isinstance(schema, Mapping) else {}
        opens = {self._open_for(kind, key) for kind in types or ("object", "string")}
        if len(opens) == 1:
            value = text.json(whole, strict=tool.strict, of=owner(tool))
            return joined(spelled(opens.pop()), value, spelled(close))
        branches = []
        for kind in sorted(types or ("array", "boolean", "integer", "null", "object", "string")):
            begin = spelled(self._open_for(kind, key))
            if kind == "string":
                branches.append(joined(begin, text.until(close)))
            else:
                value = text.json({**whole, "type": kind}, strict=False, of=owner(tool))
                branches.append(joined(begin, value, spelled(close)))
        return either(branches)

    def _open_for(self, kind: str, key: str) -> str:
        kind = "integer" if kind == "number" else kind
        return dict(self.typed_opens).get(kind, self.value_open).replace(KEY, key)

    # -- writing

    def free(self, text: GrammarText, call: str, *, parallel: bool) -> str:
        return calls_in_text(text, self.trigger, call, repeats=parallel and self.repeats)

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        frame, parts = self.frame, []
        for index, (name, arguments) in enumerate(calls):
            begin = frame.opening if index == 0 else frame.close + frame.between + frame.open
            body = self._write_arguments(json.loads(arguments))
            filled = (begin + name).replace(NAME, name) + body
            parts.append(filled.replace(INDEX, str(index)).replace(ID, f"call{index:05d}"))
        return "".join(parts) + frame.close + frame.section_close

    def _write_arguments(self, arguments: Mapping[str, Any]) -> str:
        if not arguments and self.empty is not None:
            return self.empty
        written = []
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            begin = self.key_open + key + self._open_for(type_of(value), key)
            written.append(begin + text + self.value_close.replace(KEY, key))
        return self.after_name + self.between_arguments.join(written) + self.end
