"""Structural tags: free text in which certain beginnings must be followed by a given structure.

Both forms that clients send are read: `structures` with `triggers`, and `format`, a tree of formats. The result is a
grammar of the engine; markers that are special tokens of the model are written as those tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.text.channels.grammar_text import ANY_TEXT, GrammarText, either, joined, literal
from quire.text.tokenizer import Tokenizer
from quire.types import GrammarSpec, QuireError

MAX_DEPTH = 16
MAX_TAGS = 256


def structural_grammar(spec: GrammarSpec, tokenizer: Tokenizer, param: str) -> GrammarSpec:
    """The grammar of a spec of kind `structural_tag`, whose value is the client's JSON. Raises for a wrong one."""
    try:
        value = json.loads(spec.value)
    except (ValueError, RecursionError):
        value = None
    specials = {}
    for spelling in tokenizer.special_spellings:
        if spelling in spec.value or json.dumps(spelling)[1:-1] in spec.value:
            ids = tokenizer.encode(spelling, add_special=False)
            if len(ids) == 1 and tokenizer.is_special(ids[0]):
                specials[spelling] = ids[0]
    tags = _StructuralTags(GrammarText(specials), param)
    return replace(spec, kind="ebnf", value=tags.grammar(value), warnings=tuple(tags.text.warnings))


class _StructuralTags:
    """Writes the rules of one structural tag."""

    def __init__(self, text: GrammarText, param: str):
        self.text, self._param = text, param
        self._num_tags = 0

    def grammar(self, value: Any) -> str:
        tree = self._object(value)
        if "format" in tree:
            start = self._format(self._object(tree["format"]), 0)
        else:
            tags = [
                {"begin": one.get("begin"), "content": {"type": "json_schema", "json_schema": one.get("schema")}}
                | {"end": one.get("end", "")}
                for one in map(self._object, self._list(tree, "structures"))
            ]
            start = self._triggered({"triggers": tree.get("triggers"), "tags": tags}, 0)
        return self.text.finish(start)

    def _format(self, form: Mapping[str, Any], depth: int) -> str:
        if depth > MAX_DEPTH:
            raise self._wrong(f"it is nested more than {MAX_DEPTH} deep")
        kind = form.get("type")
        if kind == "const_string":
            return self.text.spelled(self._string(form, "value"))
        if kind == "json_schema":
            return self.text.json(self._object(form.get("json_schema")), strict=False)
        if kind == "regex":
            return self.text.rule("/" + self._string(form, "pattern").replace("/", "\\/") + "/")
        if kind in ("any_text", "any_tokens"):
            return self.text.rule(ANY_TEXT)
        if kind in ("sequence", "or"):
            parts = [self._format(self._object(one), depth + 1) for one in self._list(form, "elements")]
            return joined(*parts) if kind == "sequence" else either(map(self.text.rule, parts))
        if kind == "tag":
            return joined(self.text.spelled(self._string(form, "begin")), self._rest_of(form, depth))
        if kind == "triggered_tags":
            return self._triggered(form, depth)
        if kind == "tags_with_separator":
            return self._separated(form, depth)
        raise self._wrong(f"the type {kind!r:.100} is not known")

    def _rest_of(self, tag: Mapping[str, Any], depth: int) -> str:
        """A tag's content and end."""
        self._num_tags += 1
        if self._num_tags > MAX_TAGS:
            raise self._wrong(f"it has more than {MAX_TAGS} tags")
        content, end = self._object(tag.get("content")), self._string(tag, "end", empty=True)
        if content.get("type") in ("any_text", "any_tokens") and end:
            return self.text.until(end)
        return joined(self._format(content, depth + 1), self.text.spelled(end) if end else "")

    def _triggered(self, form: Mapping[str, Any], depth: int) -> str:
        """Free text, in which each trigger begins one of its tags."""
        triggers = self._list(form, "triggers")
        tags = [self._object(one) for one in self._list(form, "tags")]
        ways = []
        for trigger in triggers:
            if not isinstance(trigger, str) or not trigger:
                raise self._wrong("a trigger is no text")
            own = [tag for tag in tags if self._string(tag, "begin").startswith(trigger)]
            if not own:
                raise self._wrong(f"no tag begins with the trigger {trigger!r:.100}")
            rests = []
            for tag in own:
                rest = self._string(tag, "begin").removeprefix(trigger)
                rests.append(joined(self.text.spelled(rest) if rest else "", self._rest_of(tag, depth)))
            ways.append(self.text.rule(f"{self.text.until(trigger)} {either(map(self.text.rule, rests))}"))
        for tag in tags:
            if not any(self._string(tag, "begin").startswith(trigger) for trigger in triggers):
                raise self._wrong(f"the tag {self._string(tag, 'begin')!r:.100} begins with no trigger")
        one = either(ways)
        if form.get("stop_after_first"):
            return one if form.get("at_least_one") else f"({one} | {self.text.rule(ANY_TEXT)})"
        return f"{one}{'+' if form.get('at_least_one') else '*'} {self.text.rule(ANY_TEXT)}"

    def _separated(self, form: Mapping[str, Any], depth: int) -> str:
        """Tags with a text between them, and nothing else."""
        tags = [self._object(one) for one in self._list(form, "tags")]
        begins = [self.text.spelled(self._string(tag, "begin")) for tag in tags]
        ends = [self._rest_of(tag, depth) for tag in tags]
        one = either(self.text.rule(joined(begin, end)) for begin, end in zip(begins, ends, strict=True))
        more = "" if form.get("stop_after_first") else f" ({literal(self._string(form, 'separator'))} {one})*"
        return f"{one}{more}" if form.get("at_least_one") else f"({one}{more})?"

    def _object(self, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise self._wrong("an object is missing")
        return value

    def _list(self, form: Mapping[str, Any], name: str) -> list[Any]:
        value = form.get(name)
        if not isinstance(value, list) or not 0 < len(value) <= MAX_TAGS:
            raise self._wrong(f"{name} is no list of 1 to {MAX_TAGS}")
        return value

    def _string(self, form: Mapping[str, Any], name: str, *, empty: bool = False) -> str:
        value = form.get(name, "" if empty else None)
        if not isinstance(value, str) or not (value or empty):
            raise self._wrong(f"{name} is no text")
        return value

    def _wrong(self, why: str) -> QuireError:
        hint = "Send structures with triggers, or a format."
        return QuireError("invalid_schema", f"The structural tag is not valid: {why}.", hint, self._param)
