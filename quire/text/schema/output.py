"""What of an output's schema is not enforced, told before the request goes to the engine."""

from __future__ import annotations

import json
from dataclasses import replace

from quire.text.schema.normal import normalise
from quire.types import GrammarSpec, QuireError


def with_schema_warnings(spec: GrammarSpec, param: str) -> GrammarSpec:
    """The same spec with its warnings. Raises what is wrong with the schema, as an error of the field `param`."""
    if spec.kind != "json_schema":
        return spec
    try:
        schema = json.loads(spec.value)
    except (ValueError, RecursionError):
        return spec  # the engine says so
    try:
        notes = normalise(schema, strict=spec.strict).notes
    except QuireError as error:
        raise QuireError(error.code, error.what, error.hint, param) from None
    return replace(spec, warnings=tuple(map(str, notes)))
