"""`docs/server.md` lists every route of the app, every field of its bodies and every error code, read from the code."""

from __future__ import annotations

import ast
import asyncio
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("fastapi")
pytest.importorskip("tokenizers")

from pydantic import BaseModel

from quire.server.http.bodies import body_models
from quire.server.http.errors import INTERNAL_CODES, STATUS_BY_CODE
from quire.server.schemas import Body, Sampling, Service
from tests.fuzz.fake_server import FakeServer

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "server.md").read_text()
# Said before a server takes requests, by a library or a file, or between its processes: never an answer.
NO_ANSWERS = {
    "address_in_use": "the port is bound before the model is loaded",
    "bad_gguf": "the model's file is read at the start",
    "bad_message": "between processes",
    "bad_tokenizer": "the model's file is read at the start",
    "bad_trace_file": "of quire trace",
    "cache_folder": "the folder is opened at the start",
    "duplicate_id": "the server makes the ids",
    "frames_damaged": "between processes",
    "frames_foreign": "between processes",
    "frames_lost": "between processes",
    "frames_repeated": "between processes",
    "invalid_setting": "settings are read at the start",
    "invalid_path": "of `quire cache` and LLM.sessions",
    "invalid_session_file": "of `quire cache` and LLM.sessions",
    "missing_package": "stores are opened at the start",
    "no_end_token": "vocabularies are read at the start",
    "no_grammar": "a server always has grammars",
    "no_tokenizer": "a model without one is not served",
    "prompt_too_long": "an answer calls it context_length_exceeded",
    "unsupported_tokenizer": "the model's file is read at the start",
    "version_mismatch": "between processes",
}
RAISERS = {"QuireError": 0, "bad_request": 0, "ApiError": 1}


def routes_of(tmp_path: Path) -> set[tuple[str, str]]:
    async def make() -> FakeServer:
        return FakeServer(tmp_path)

    app: Any = asyncio.run(make()).app
    found = set()
    for outer in app._app.routes:
        for route in getattr(getattr(outer, "original_router", None), "routes", [outer]):
            found |= {(method, route.path) for method in route.methods if method not in ("HEAD", "OPTIONS")}
    return found


def test_every_route_is_told(tmp_path: Path) -> None:
    table = TEXT[TEXT.index("## Routes") : TEXT.index("## Fields")]
    told = set()
    for cell in (line.split("|")[1] for line in table.splitlines() if line.startswith("| `")):
        methods: list[str] = []
        for item in re.findall(r"`([^`]+)`", cell):
            words = item.split()
            methods = words[0].split("/") if len(words) > 1 else methods or [words[0]]
            told |= {(method, re.sub(r":path", "", words[-1])) for method in methods if words[-1].startswith("/")}
    there = {(method, re.sub(r":path", "", path)) for method, path in routes_of(tmp_path)}
    assert len(there) > 25
    assert told == there, (sorted(there - told), sorted(told - there))


def rows() -> Iterator[str]:
    """A line for each body, and one for each object in it, where it is first met."""
    seen: set[type[BaseModel]] = set()
    for route, model in body_models().items():
        if model not in seen:
            routes = ", ".join(f"`{other}`" for other, theirs in body_models().items() if theirs is model)
            yield from _rows_of(model, routes, route, (), seen)


def _rows_of(
    model: type[BaseModel], label: str, route: str, place: tuple[str, ...], seen: set[type[BaseModel]]
) -> Iterator[str]:
    seen.add(model)
    names = {field.alias or name: field for name, field in model.model_fields.items()}
    shared = Sampling if issubclass(model, Sampling) else Service if issubclass(model, Service) else Body
    rest = {Sampling: ", and those of sampling and service", Service: ", and those of service", Body: ""}[shared]
    own = [name for name in names if name not in shared.model_fields]
    yield f"| {label} | {', '.join(f'`{name}`' for name in own)}{rest} |"
    for name, field in names.items():
        there = _models_in(field.annotation)
        for inner in (inner for inner in there if inner not in seen):
            inside = (*place, name)
            kind = f", {_kind_of(inner)}" if len(there) > 1 else ""
            yield from _rows_of(inner, f"`{'.'.join(inside)}`{kind} of `{route}`", route, inside, seen)


def _kind_of(model: type[BaseModel]) -> str:
    """Which of several objects of one place it is."""
    return str(typing.get_args(model.model_fields["type"].annotation)[0])


def _models_in(kind: Any) -> list[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [model for inner in typing.get_args(kind) for model in _models_in(inner)]


def test_every_field_is_told() -> None:
    missing = [row for row in rows() if row not in TEXT]
    assert not missing, "put these rows into docs/server.md:\n" + "\n".join(missing)
    for model in (Sampling, Service):
        assert not [name for name in model.model_fields if f"`{name}`" not in TEXT]


def codes() -> dict[str, str]:
    """Every code an error is made with, and one place where it is."""
    found: dict[str, str] = {}
    package = ROOT / "quire"
    for folder in ("server", "text", "types", "engine", "runtime", "cache"):
        for file in sorted((package / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call):
                    name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                    place = RAISERS.get(name, len(node.args))
                    code = node.args[place] if place < len(node.args) else None
                    if isinstance(code, ast.Constant) and isinstance(code.value, str):
                        found.setdefault(code.value, f"{file.relative_to(ROOT)}:{node.lineno}")
    return found


def test_every_code_is_told() -> None:
    found = codes()
    assert len(found) > 50
    table = TEXT[TEXT.index("## Errors") : TEXT.index("## Operation")]
    told = set(re.findall(r"`([a-z_]+)`", table))
    missing = {code: place for code, place in found.items() if code not in told and code not in NO_ANSWERS}
    assert not missing, missing
    assert not [code for code in (*STATUS_BY_CODE, *INTERNAL_CODES) if code not in told and code not in NO_ANSWERS]
    assert set(NO_ANSWERS) <= set(found) | INTERNAL_CODES, "an exception that no code needs any more"
