"""A session's file as load: the requests that were sent to the model, and how long tools took between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.agent.session.log import read_records
from quire.agent.session.records import Record, SessionState, is_from_user
from quire.types import QuireError

DEFAULT_OUTPUT = 64  # tokens of an answer whose length was not recorded
MAX_REQUESTS = 10_000


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request to the model as it was sent."""

    messages: list[Record]
    output_tokens: int
    delay: float  # seconds of the tools that ran before it
    turn: int  # of the user, from 0
    is_follow_up: bool  # comes after calls of tools, not after the user


@dataclass(slots=True)
class AgentTrace:
    """What a session asked of an engine."""

    name: str
    tools: list[str]  # names of those that the model was offered
    requests: list[TracedRequest] = field(default_factory=list)


def read_trace(path: Path) -> AgentTrace:
    """Reads the file of a session, as `quire chat` saves them."""
    try:
        records, _ = read_records(path)
    except OSError as error:
        raise QuireError("usage", f"{path} can't be read: {error.strerror}.") from error
    if not records or records[0].get("type") != "session":
        raise QuireError("usage", f"{path} is no session of the agent.", "`quire chat --list-sessions` lists them.")
    return trace_of(path.stem, records)


def trace_of(name: str, records: Iterable[Record]) -> AgentTrace:
    """Returns the requests of a session's records. Answers that were interrupted are left out: their length says
    nothing about the model."""
    state, trace = SessionState(), AgentTrace(name, [])
    turn, delay = -1, 0.0
    for record in records:
        kind, message = record.get("type"), record.get("message")
        if kind == "session":
            trace.tools = [str(tool) for tool in record.get("tools") or ()]
        elif kind == "result":
            delay = max(delay, float(record.get("seconds") or 0.0))  # calls side by side take as long as the longest
        elif kind == "message" and isinstance(message, dict):
            if is_from_user(message):
                turn, delay = turn + 1, 0.0
            elif message.get("role") == "assistant" and not record.get("interrupted") and turn >= 0:
                context = state.context()
                last_role = context[-1]["role"] if context else ""
                trace.requests.append(TracedRequest(context, _output_tokens(record), delay, turn, last_role == "tool"))
                delay = 0.0
        state.apply(record)
    if not trace.requests:
        raise QuireError("usage", f"{name} holds no answer of a model.", "Use a session in which something was said.")
    if len(trace.requests) > MAX_REQUESTS:
        raise QuireError("usage", f"{name} holds more than {MAX_REQUESTS} requests.")
    return trace


def _output_tokens(record: Record) -> int:
    usage: Any = record.get("usage")
    tokens = usage.get("output_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) and tokens > 0 else DEFAULT_OUTPUT
