"""Resolves a `$ref` to a place in the same document, by pointer, anchor or `$id`.

Nothing is ever fetched. Targets are found in the client's schema; `Walk` copies them to `$defs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from quire.text.schema.notes import below

MAX_CHAIN = 64  # references to references
MAX_WORK = 1_000_000  # values visited for questions about circularity and exclusiveness
_REFS = ("$ref", "$recursiveRef", "$dynamicRef")


class References:
    """The targets of references in one document."""

    def __init__(self, root: Any):
        self._root = root
        self._named: dict[str, tuple[str, Any]] | None = None
        self._circular: dict[str, bool] = {}
        self._work = 0

    def may_look(self, steps: int = 1) -> bool:
        """Count visited values. Returns False once the budget is spent; callers then answer "not known"."""
        self._work += steps
        return self._work <= MAX_WORK

    def find(self, ref: str) -> tuple[str, Any] | None:
        """The place and the schema that `ref` refers to; None if it is not in this document."""
        for _ in range(MAX_CHAIN):
            found = self._find_one(ref)
            if found is None:
                return None
            following = pure_ref(found[1])
            if following is None:
                return found
            ref = following
        return None  # a chain without an end

    def is_circular(self, place: str, schema: Any) -> bool:
        """Whether the schema at `place` refers to itself, directly or through others."""
        if place not in self._circular:
            seen: set[str] = set()
            stack, circular = [schema], False
            while stack and not circular:
                if not self.may_look():
                    circular = True  # not known; true is the safe answer
                    break
                refs, count = _refs_in(stack.pop())
                self.may_look(count)
                for ref in refs:
                    found = self.find(ref)
                    if found is None or found[0] in seen:
                        continue
                    seen.add(found[0])
                    circular = circular or found[0] == place
                    stack.append(found[1])
            self._circular[place] = circular
        return self._circular[place]

    def _find_one(self, ref: str) -> tuple[str, Any] | None:
        base, mark, fragment = ref.partition("#")
        fragment = unquote(fragment)
        place, schema = "#", self._root
        if base:
            named = self._names().get(base) or self._names().get(base.rstrip("/"))
            if named is None:
                return None
            place, schema = named
        if not fragment:
            return (place, schema) if base or mark else None
        if not fragment.startswith("/"):
            return self._names().get(f"{base}#{fragment}") or self._names().get(f"#{fragment}")
        for part in fragment[1:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(schema, Mapping) and key in schema:
                schema = schema[key]
            elif isinstance(schema, list) and key.isascii() and key.isdigit() and int(key) < len(schema):
                schema = schema[int(key)]
            else:
                return None
            place = below(place, key)
        return (place, schema) if isinstance(schema, (Mapping, bool)) else None

    def _names(self) -> dict[str, tuple[str, Any]]:
        """Every `$id` and anchor of the document, with its place and schema."""
        if self._named is None:
            self._named = {}
            stack: list[tuple[str, Any, str]] = [("#", self._root, "")]
            while stack:
                place, value, base = stack.pop()
                if isinstance(value, Mapping):
                    for key in ("$id", "id"):
                        name = value.get(key)
                        if isinstance(name, str) and name:
                            base = name.partition("#")[0] or base
                            self._named.setdefault(name.rstrip("#") if name != "#" else name, (place, value))
                    for key in ("$anchor", "$dynamicAnchor"):
                        if isinstance(value.get(key), str):
                            self._named.setdefault(f"#{value[key]}", (place, value))
                    stack.extend((below(place, key), inner, base) for key, inner in value.items())
                elif isinstance(value, list):
                    stack.extend((below(place, index), inner, base) for index, inner in enumerate(value))
        return self._named


def ref_of(schema: Mapping[str, Any]) -> str | None:
    """The schema's reference, if any. Dynamic references are resolved statically."""
    return next((schema[key] for key in _REFS if isinstance(schema.get(key), str)), None)


def pure_ref(schema: Any) -> str | None:
    """The reference of a schema that has no other keyword."""
    if not isinstance(schema, Mapping) or len(schema) != 1:
        return None
    return ref_of(schema)


def _refs_in(schema: Any) -> tuple[list[str], int]:
    """All references inside a schema, and the number of values visited."""
    found, stack, count = [], [schema], 0
    while stack:
        value = stack.pop()
        count += 1
        if isinstance(value, Mapping):
            ref = ref_of(value)
            if ref is not None:
                found.append(ref)
            stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)
    return found, count
