"""Rewrites a JSON schema into the keywords that the grammar library enforces, with notes about the others.

The result holds no annotations, no unknown keywords, and references to its own `$defs` only. Keywords are read in
groups: `values` for single values, `shapes` for objects and arrays, `logic` for combinations of schemas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.text.schema.logic import read_logic
from quire.text.schema.notes import SchemaNote, SchemaNotes, broken, shown, too_much
from quire.text.schema.refs import References, ref_of
from quire.text.schema.shapes import read_array, read_object
from quire.text.schema.values import read_values
from quire.types import QuireError

MAX_DEPTH = 64
MAX_SCHEMAS = 50_000
MAX_PATTERNS = 256  # different patterns; each is compiled separately
_SIBLINGS_MEAN_NOTHING = ("draft-03", "draft-04", "draft-06", "draft-07")  # drafts that ignore keywords beside $ref


@dataclass(frozen=True, slots=True)
class Normal:
    """A rewritten schema."""

    schema: dict[str, Any]  # the enforced part
    notes: tuple[SchemaNote, ...]  # keywords that are not enforced


def normalise(schema: Any, *, strict: bool) -> Normal:
    """The enforced part of a schema. `strict`: refuse keywords that can't be enforced, by name and place, instead of
    leaving them out. Raises `invalid_schema` or `grammar_too_complex`."""
    walk = Walk(schema, SchemaNotes(strict))
    try:
        made = walk.whole(schema)
    except RecursionError:
        raise too_much("The JSON schema is nested too deeply.") from None
    return Normal(made, tuple(walk.findings.notes))


class Walk:
    """One traversal of a schema. The readers of keywords call `schema` for nested schemas."""

    def __init__(self, root: Any, findings: SchemaNotes):
        self.references = References(root)
        self.findings = findings
        self._names: dict[str, str] = {}  # place of a reference's target -> its name in $defs
        self._waiting: list[tuple[str, str, Any]] = []  # targets not yet added to $defs
        self._num_schemas = 0
        self._patterns: set[str] = set()
        self._copied: list[str] = []  # targets being copied into combinations
        self._active: set[str] = set()  # places on the current path
        stated = root.get("$schema") if isinstance(root, Mapping) else None
        self._skips_siblings = isinstance(stated, str) and any(name in stated for name in _SIBLINGS_MEAN_NOTHING)

    def whole(self, schema: Any) -> dict[str, Any]:
        made = self.schema(schema, "#", 0)
        definitions: dict[str, Any] = {}
        while self._waiting:
            name, place, target = self._waiting.pop()
            definitions[name] = self.schema(target, place, 0)
        if made is False:
            raise QuireError("invalid_schema", "The schema at # is false: it allows no value.", "Correct it.")
        found = {} if made is True else made
        return {**found, "$defs": definitions} if definitions else found

    def schema(self, schema: Any, place: str, depth: int, *, joined: bool = False) -> Any:
        """The enforced form of the schema at `place`: an object or a boolean. `joined`: it is combined with others."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            where, _, keyword = place.rpartition("/")
            raise broken(keyword, where, f"holds {shown(json.dumps(schema))}, which is no schema")
        self._num_schemas += 1
        if depth > MAX_DEPTH:
            raise too_much(f"The JSON schema is nested deeper than {MAX_DEPTH} schemas, at {shown(place)}.")
        if self._num_schemas > MAX_SCHEMAS:
            raise too_much(f"The JSON schema holds more than {MAX_SCHEMAS} schemas.")
        if place in self._active and not joined:
            return self._pointer((place, schema))  # the path leads through a copy of an enclosing schema
        is_new = place not in self._active
        self._active.add(place)
        try:
            return self._read(schema, place, depth, joined)
        finally:
            if is_new:
                self._active.discard(place)

    def _read(self, schema: Mapping[str, Any], place: str, depth: int, joined: bool) -> Any:
        ref = ref_of(schema)
        if ref is None:
            return self._without_ref(schema, place, depth)
        target = self.references.find(ref)
        if target is None:
            self.findings.leave_out("$ref", place, f"there is no {shown(repr(ref))} in this schema")
            return self._without_ref(schema, place, depth)
        beside = {} if self._skips_siblings else self._without_ref(schema, place, depth)
        if beside is True or beside == {}:
            return self._copy(target, place, depth) if joined else self._pointer(target)
        if beside is False:
            return False
        return {**beside, "allOf": [*beside.get("allOf", ()), self._copy(target, place, depth)]}

    def new_pattern(self, pattern: str) -> None:
        """Count a pattern before it is compiled."""
        self._patterns.add(pattern)
        if len(self._patterns) > MAX_PATTERNS:
            raise too_much(f"The JSON schema holds more than {MAX_PATTERNS} different patterns.")

    def _without_ref(self, schema: Mapping[str, Any], place: str, depth: int) -> Any:
        made: dict[str, Any] = {}
        more: list[Any] = []  # further schemas that must hold
        read_values(self, schema, place, made, more)
        read_array(self, schema, place, depth, made)
        read_object(self, schema, place, depth, made, more)
        read_logic(self, schema, place, depth, made, more)
        more = [part for part in more if part is not True and part != {}]
        if any(part is False for part in more):
            return False
        if more:
            made["allOf"] = more
        return more[0] if more and len(made) == 1 and len(more) == 1 else made

    def _pointer(self, target: tuple[str, Any]) -> dict[str, Any]:
        place, schema = target
        if place not in self._names:
            self._names[place] = f"d{len(self._names)}"
            self._waiting.append((self._names[place], place, schema))
        return {"$ref": f"#/$defs/{self._names[place]}"}

    def _copy(self, target: tuple[str, Any], place: str, depth: int) -> Any:
        """A copy of a circular target: the library combines no circular schema with others, but it takes a copy whose
        parts are circular."""
        if not self.references.is_circular(*target):
            return self._pointer(target)
        if target[0] in self._copied:
            self.findings.leave_out("$ref", place, "it leads back to itself and other schemas must fit as well")
            return True
        self._copied.append(target[0])
        try:
            return self.schema(target[1], target[0], depth + 1, joined=True)
        finally:
            self._copied.pop()
