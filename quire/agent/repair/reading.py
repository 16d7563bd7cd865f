"""Turns an answer into calls that are ready to run, or into a sentence that tells the model what was wrong.

All calls of an answer are good, or none is run.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.agent.engines.seam import ModelAnswer, ModelCall
from quire.agent.repair.arguments import fit_arguments
from quire.agent.repair.call_shapes import NamedCall, Schemas, known_name, object_of, unknown_tool
from quire.agent.repair.lenient_json import MalformedCall, unique_keys
from quire.agent.repair.payloads import find_calls

MAX_CALLS = 32  # maximum number of calls in one answer


@dataclass(slots=True)
class ReadyCall:
    """A call whose tool exists and whose arguments fit its schema."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(slots=True)
class CallReading:
    text: str  # the answer without its calls
    calls: list[ReadyCall] = field(default_factory=list)
    problem: str = ""  # why the calls were refused, for the model
    tool: str | None = None  # the tool that was meant, if that is certain
    was_repaired: bool = False


def read_answer(answer: ModelAnswer, tools: Sequence[dict[str, Any]]) -> CallReading:
    """Reads the calls of an answer. `tools` are those that the model was offered, in OpenAI's form."""
    schemas: Schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    reading = CallReading(answer.content)
    if not schemas:
        return reading
    try:
        if answer.calls:
            reading.calls = [_from_engine(call, schemas, reading) for call in answer.calls]
        else:
            _from_text(answer, schemas, reading)
        if len(reading.calls) > MAX_CALLS:
            raise MalformedCall(f"one answer may hold {MAX_CALLS} calls, not {len(reading.calls)}")
    except MalformedCall as error:
        reading.calls = []
        reading.problem = str(error)
        reading.tool = reading.tool or _only_tool_named(answer, schemas)
    return reading


def explain_problem(reading: CallReading) -> str:
    """Returns the message that tells the model what was wrong."""
    return f"Your tool call was not run: {reading.problem}. Write the call again, complete and in the right form."


def _from_engine(call: ModelCall, schemas: Schemas, reading: CallReading) -> ReadyCall:
    name = known_name(call.name, schemas)
    if name is None:
        raise unknown_tool(call.name, schemas)
    reading.tool = name
    if not call.is_complete:
        raise MalformedCall("the answer ended inside the call; make it shorter")
    try:
        arguments = json.loads(call.arguments or "{}", object_pairs_hook=unique_keys)
        if not isinstance(arguments, dict):
            arguments = object_of(arguments)
            reading.was_repaired = True
    except (ValueError, RecursionError):
        arguments = object_of(call.arguments)
        reading.was_repaired = True
    return ReadyCall(call.id, name, fit_arguments(schemas[name], arguments, name))


def _from_text(answer: ModelAnswer, schemas: Schemas, reading: CallReading) -> None:
    found = find_calls(answer.content, schemas)
    if found is None:
        return
    if answer.finish_reason == "length":
        raise MalformedCall("the answer ended inside the call; make it shorter")
    reading.calls = [_ready(call, schemas) for call in found.calls]
    reading.text, reading.was_repaired = found.before, True


def _ready(call: NamedCall, schemas: Schemas) -> ReadyCall:
    arguments = fit_arguments(schemas[call.name], call.arguments, call.name)
    return ReadyCall(f"call_{secrets.token_hex(12)}", call.name, arguments)


def _only_tool_named(answer: ModelAnswer, schemas: Schemas) -> str | None:
    named = [name for name in schemas if name in answer.content]
    return named[0] if len(named) == 1 else None
