"""`@tool`: a typed Python function as a tool. Its schema comes from its signature, its description from its docstring.

The function runs in the agent's own process, outside the sandbox, so each call is asked for.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from quire.agent.tools.seam import Risk, ToolContext, ToolResult, object_schema
from quire.types import QuireError

_NAME = re.compile(r"[A-Za-z0-9_\-]{1,64}\Z")
_SCHEMAS: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    list: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}


class FunctionTool:
    """One function. A text it returns is the result; other values are written as JSON."""

    risk = Risk.OUTSIDE

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        self.name = name or function.__name__
        if not _NAME.match(self.name):
            raise QuireError(
                "invalid_tool", f"{self.name!r:.80} is no name of a tool.", "Give it one: @tool(name=...)."
            )
        self.description = inspect.getdoc(function) or self.name
        self.parameters = _parameters(function)
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def describe(self, arguments: Mapping[str, Any]) -> str:
        return json.dumps(dict(arguments), ensure_ascii=False)

    def preview(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult | None:
        return None

    def run(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        value = self._function(**arguments)
        return ToolResult(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))

    def close(self) -> None:
        pass


@typing.overload
def tool(function: Callable[..., Any]) -> FunctionTool: ...


@typing.overload
def tool(*, name: str) -> Callable[[Callable[..., Any]], FunctionTool]: ...


def tool(function: Callable[..., Any] | None = None, *, name: str | None = None) -> Any:
    """Makes a tool of a typed function: `@tool` or `@tool(name="...")`."""
    if function is not None:
        return FunctionTool(function, name)
    return lambda one: FunctionTool(one, name)


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the schema of a function's arguments. Raises `QuireError` for one that a model can't call."""
    hints = typing.get_type_hints(function, include_extras=True)
    required, properties = [], {}
    for parameter in inspect.signature(function).parameters.values():
        where = f"{function.__name__}({parameter.name})"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise QuireError("invalid_tool", f"{where} can't be given by name.", "Use plain arguments.")
        if parameter.name not in hints:
            raise QuireError("invalid_tool", f"{where} has no type.", "Give it one, such as str.")
        schema = _schema(hints[parameter.name], where)
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        properties[parameter.name] = schema
    return object_schema(tuple(required), **properties)


def _schema(hint: Any, where: str) -> dict[str, Any]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        words = [word for word in inner[1:] if isinstance(word, str)]
        return {**_schema(inner[0], where), **({"description": words[0]} if words else {})}
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        kinds = [_schema(one, where) for one in inner if one is not type(None)]
        kinds += [{"type": "null"}] if type(None) in inner else []
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    if origin is list and inner:
        return {"type": "array", "items": _schema(inner[0], where)}
    if origin is dict and len(inner) == 2 and inner[0] is str:
        return {"type": "object", "additionalProperties": _schema(inner[1], where)}
    if hint in _SCHEMAS:
        return dict(_SCHEMAS[hint])
    raise QuireError(
        "invalid_tool", f"{where} has the type {hint}, which has no schema.", "Use str, int, list, dict, …"
    )
