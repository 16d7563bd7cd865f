"""Warnings about the parts of an output's schema that are not enforced."""

from __future__ import annotations

import json
from dataclasses import replace

from quire.text.schema.normal import normalise
from quire.types import GrammarSpec, QuireError


def with_schema_warnings(spec: GrammarSpec, param: str) -> GrammarSpec:
    """`spec` with its warnings. Raises for an invalid schema, with `param` as the field at fault."""
    if spec.kind != "json_schema":
        return spec
    try:
        schema = json.loads(spec.value)
    except (ValueError, RecursionError):
        return spec  # the engine refuses it
    try:
        notes = normalise(schema, strict=spec.strict).notes
    except QuireError as error:
        raise QuireError(error.code, error.what, error.hint, param) from None
    return replace(spec, warnings=tuple(map(str, notes)))
