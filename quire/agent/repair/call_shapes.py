"""Takes the name and the arguments of a call out of a parsed value, whatever keys the model chose for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from quire.agent.repair.lenient_json import MalformedCall, parse_json

NAME_KEYS = ("name", "tool", "tool_name", "function", "function_name", "action", "recipient_name", "method")
ARGUMENT_KEYS = ("arguments", "parameters", "args", "params", "input", "tool_input", "action_input", "kwargs")
LIST_KEYS = ("tool_calls", "tool_uses", "function_calls", "calls", "actions")
_IDLE_KEYS = {"id", "type", "index", "call_id", "thought", "reasoning", "explanation"}
_PREFIXES = ("functions.", "default_api.", "tools.", "function.", "tool.", "multi_tool_use.")


class NamedCall(NamedTuple):
    name: str
    arguments: dict[str, Any]


Schemas = Mapping[str, Mapping[str, Any]]  # tool name -> schema of its arguments


def known_name(text: Any, schemas: Schemas) -> str | None:
    """Returns the one tool that this name can mean; None if there is none. Prefixes, case, and the choice between
    hyphens and underscores do not matter if only one tool is meant."""
    if not isinstance(text, str):
        return None
    name = text.strip().strip("`\"'")
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    name = name.partition(":")[0] if name.partition(":")[2].isdigit() else name
    if name in schemas:
        return name
    alike = [tool for tool in schemas if _plain(tool) == _plain(name)]
    return alike[0] if len(alike) == 1 else None


def _plain(name: str) -> str:
    return name.replace("-", "").replace("_", "").replace(" ", "").lower()


def calls_of(value: Any, schemas: Schemas) -> list[NamedCall]:
    """Returns the calls that a value stands for. Raises `MalformedCall` if it is none."""
    if isinstance(value, list):
        if not value:
            raise MalformedCall("the list of calls is empty")
        return [call for item in value for call in calls_of(item, schemas)]
    if not isinstance(value, dict):
        raise MalformedCall("a call is an object with a name and arguments")
    lists = [key for key in LIST_KEYS if isinstance(value.get(key), list)]
    if len(lists) == 1:
        return calls_of(value[lists[0]], schemas)
    inner = value.get("function")
    if isinstance(inner, dict):
        return [_call(inner, schemas)]
    return [_call(value, schemas)]


def looks_like_call(value: Any, schemas: Schemas) -> bool:
    """Whether a value can only be meant as a call: it names a tool where a name stands, and has arguments."""
    try:
        return bool(calls_of(value, schemas))
    except MalformedCall:
        return False


def _call(value: dict[str, Any], schemas: Schemas) -> NamedCall:
    named = [key for key in NAME_KEYS if isinstance(value.get(key), str)]
    given = [key for key in ARGUMENT_KEYS if key in value and key not in named]
    if not named:
        return _keyed_by_name(value, schemas)
    key = named[0]
    name = known_name(value[key], schemas)
    if name is None:
        raise unknown_tool(value[key], schemas)
    if len(given) > 1:
        raise MalformedCall(f"it has both {given[0]!r} and {given[1]!r}")
    if given:
        rest = [other for other in value if other not in (key, given[0]) and other not in _IDLE_KEYS]
        if rest:
            raise MalformedCall(f"{rest[0]!r} stands beside the arguments instead of inside them")
        return NamedCall(name, object_of(value[given[0]]))
    flat = {other: item for other, item in value.items() if other != key and other not in _IDLE_KEYS}
    return NamedCall(name, flat)


def _keyed_by_name(value: dict[str, Any], schemas: Schemas) -> NamedCall:
    """Reads `{"shell": {"command": …}}`."""
    keys = [key for key in value if key not in _IDLE_KEYS]
    name = known_name(keys[0], schemas) if len(keys) == 1 else None
    if name is None or not isinstance(value[keys[0]], dict):
        raise MalformedCall("a call is an object with a name and arguments")
    return NamedCall(name, value[keys[0]])


def object_of(value: Any) -> dict[str, Any]:
    """Returns the arguments as an object; some models write it as text, or nothing for none."""
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        parsed, end = parse_json(value, may_lack_end=False)
        if value[end:].strip():
            raise MalformedCall("text follows the arguments")
        value = parsed
    if not isinstance(value, dict):
        raise MalformedCall("the arguments must be an object")
    return value


def unknown_tool(name: Any, schemas: Schemas) -> MalformedCall:
    return MalformedCall(f"there is no tool {str(name)[:60]!r}; the tools are {', '.join(schemas)}")
