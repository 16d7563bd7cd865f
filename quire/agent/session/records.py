"""The records of a session, and the state that they build up. The same code runs while a session is live and when it is
read back, so that a resumed session is what the killed one was.

| record | means |
| --- | --- |
| `session` | the first line: id, folder, model, system message, tools |
| `message` | a whole message in OpenAI's form, with usage and times if it is an answer |
| `delta` | text of an answer that is not whole yet; superseded by its `message` |
| `call`, `result` | a tool call began; it ended |
| `summary` | earlier messages are replaced by a summary in what the model sees |
| `undo`, `reset`, `system` | messages were taken back; all were; the system message changed |
| `turn` | a turn ended, with its status |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Record = dict[str, Any]
VERSION = 1
LOST_RESULT = "The session ended while this call ran. It may have run partly; check before running it again."


@dataclass(slots=True)
class SessionState:
    """The state of a session after the records so far."""

    id: str = ""
    created: float = 0.0
    folder: str = ""
    model: str = ""
    system: str = ""
    messages: list[Record] = field(default_factory=list)  # all messages, also those a summary replaces
    summary: str = ""
    summarized: int = 0  # messages that the summary replaces
    partial: str = ""  # an answer that was cut off
    partial_reasoning: str = ""
    calls: dict[str, Record] = field(default_factory=dict)  # began and not ended
    num_turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    last_usage: Record = field(default_factory=dict)

    def apply(self, record: Record) -> None:
        """Applies one record. Unknown kinds are left alone, so that an older version reads a newer file."""
        handler = _HANDLERS.get(str(record.get("type")))
        if handler is not None:
            handler(self, record)

    def context(self) -> list[Record]:
        """Returns the messages that the model sees."""
        head: list[Record] = [{"role": "system", "content": self.system}] if self.system else []
        if self.summary:
            told = f"Summary of the conversation so far:\n\n{self.summary}"
            head += [{"role": "user", "content": told}, {"role": "assistant", "content": "I will go on from there."}]
        return [*head, *without_orphans(self.messages[self.summarized :])]

    def closing_records(self) -> list[Record]:
        """Returns the records that bring a session that was cut off to a state from which it can go on."""
        records: list[Record] = []
        if self.partial or self.partial_reasoning:
            message = {"role": "assistant", "content": self.partial}
            records.append({"type": "message", "message": message, "interrupted": True})
        for call_id in self.open_calls():
            name = self.calls.get(call_id, {}).get("name", "")
            records.append({"type": "result", "id": call_id, "name": name, "content": LOST_RESULT, "status": "lost"})
        return records

    def open_calls(self) -> list[str]:
        """The ids of calls in messages that have no result yet."""
        wanted = [str(call["id"]) for message in self.messages for call in message.get("tool_calls") or ()]
        answered = {str(message.get("tool_call_id")) for message in self.messages if message.get("role") == "tool"}
        return [call_id for call_id in wanted if call_id not in answered]

    def last_user_index(self) -> int | None:
        places = [index for index, message in enumerate(self.messages) if is_from_user(message)]
        return places[-1] if places else None


def without_orphans(messages: list[Record]) -> list[Record]:
    """Returns the messages without results whose call is missing, which no chat template can render."""
    asked = {str(call.get("id")) for message in messages for call in message.get("tool_calls") or ()}
    return [one for one in messages if one.get("role") != "tool" or str(one.get("tool_call_id")) in asked]


def is_from_user(message: Record) -> bool:
    """Whether the user wrote it, rather than the agent in the user's role."""
    return message.get("role") == "user" and not message.get("agent")


def _begin(state: SessionState, record: Record) -> None:
    state.id, state.folder = str(record.get("id", "")), str(record.get("folder", ""))
    state.created = float(record.get("created") or 0.0)
    state.model, state.system = str(record.get("model", "")), str(record.get("system") or "")


def _message(state: SessionState, record: Record) -> None:
    message = record.get("message")
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return
    state.messages.append(message)
    if message["role"] == "assistant":
        state.partial = state.partial_reasoning = ""
    usage = record.get("usage")
    if isinstance(usage, dict):
        state.last_usage = usage
        state.prompt_tokens += int(usage.get("prompt_tokens") or 0)
        state.cached_tokens += int(usage.get("cached_tokens") or 0)
        state.output_tokens += int(usage.get("output_tokens") or 0)


def _delta(state: SessionState, record: Record) -> None:
    state.partial += str(record.get("text") or "")
    state.partial_reasoning += str(record.get("reasoning") or "")


def _dropped(state: SessionState, record: Record) -> None:
    state.partial = state.partial_reasoning = ""


def _call(state: SessionState, record: Record) -> None:
    state.calls[str(record.get("id"))] = record


def _result(state: SessionState, record: Record) -> None:
    call_id = str(record.get("id"))
    state.calls.pop(call_id, None)
    message = {"role": "tool", "tool_call_id": call_id, "content": str(record.get("content") or "")}
    if record.get("name"):
        message["name"] = str(record["name"])
    state.messages.append(message)


def _summary(state: SessionState, record: Record) -> None:
    state.summary = str(record.get("text") or "")
    state.summarized = min(int(record.get("messages") or 0), len(state.messages))


def _undo(state: SessionState, record: Record) -> None:
    keep = max(0, int(record.get("messages") or 0))
    del state.messages[keep:]
    state.calls.clear()
    if state.summarized > keep:
        state.summary, state.summarized = "", 0


def _reset(state: SessionState, record: Record) -> None:
    state.messages.clear()
    state.calls.clear()
    state.summary, state.summarized, state.partial, state.partial_reasoning = "", 0, "", ""


def _system(state: SessionState, record: Record) -> None:
    state.system = str(record.get("text") or "")


def _turn(state: SessionState, record: Record) -> None:
    state.num_turns += 1


def _model(state: SessionState, record: Record) -> None:
    state.model = str(record.get("name") or "")


_HANDLERS = {
    "session": _begin,
    "message": _message,
    "delta": _delta,
    "dropped": _dropped,
    "call": _call,
    "result": _result,
    "summary": _summary,
    "undo": _undo,
    "reset": _reset,
    "system": _system,
    "turn": _turn,
    "model": _model,
}
