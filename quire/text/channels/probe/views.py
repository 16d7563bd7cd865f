"""Probe conversations: what a template writes for an answer, for calls and for reasoning, found by rendering them.

The names, keys and values of the probes occur nowhere else, so each can be found in the text. Templates differ in what
they accept (arguments as an object or as text, content that is empty, null or missing), so variants are tried.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.types import QuireError

Message = dict[str, Any]
Render = Callable[..., str]  # (messages, tools=…, add_generation_prompt=…, **variables), as ChatTemplate.render

USER, ANSWER, THOUGHT = "qxuserq", "qxanswerq", "qxthoughtq"
FIRST, SECOND, THIRD = "qxalphaq", "qxbetaq", "qxgammaq"  # names of tools
KEYS, VALUES = ("qxkeyoneq", "qxkeytwoq"), ("qxvalueoneq", "qxvaluetwoq")
ARGUMENTS = dict(zip(KEYS, VALUES, strict=True))
CALL_IDS = ("qxcall01q", "qxcall02q", "qxcall03q")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
# Names under which templates look for the tools, besides `tools`.
TOOL_VARIABLES: Mapping[str, Callable[[list[dict[str, Any]]], Any]] = {
    "available_tools": list,
    "xml_tools": list,
    "functions": lambda tools: json.dumps([tool["function"] for tool in tools], ensure_ascii=False),
}
MAX_SECONDS = 3.0  # of all probes of one template; what is not known by then stays unknown


def probe_tools() -> list[dict[str, Any]]:
    properties = {key: {"type": "string", "description": "a text"} for key in KEYS}
    bodies = [
        {
            "name": FIRST,
            "description": "a tool",
            "parameters": {"type": "object", "properties": properties, "required": list(KEYS)},
        },
        {
            "name": SECOND,
            "description": "a tool",
            "parameters": {"type": "object", "properties": properties, "required": list(KEYS)},
        },
        {"name": THIRD, "description": "a tool", "parameters": {"type": "object", "properties": {}}},
    ]
    return [{"type": "function", "function": body} for body in bodies]


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a template takes an earlier message with calls."""

    arguments_as_text: bool = False
    content: str | None = ""


CALL_FORMS = (CallForm(), CallForm(content=None), CallForm(True), CallForm(True, None))


class ProbeViews:
    """Renders probes of one template. Each view is the text after the user's message, or None where it can't be."""

    def __init__(self, render: Render, is_spent: Callable[[], bool]):
        self._render = render
        self._is_spent = is_spent
        self.variables: dict[str, Any] = {}
        self.tool_variable: str | None = "tools"
        self.has_tools = self._find_tool_variable()
        self.form = CallForm()
        self.is_single = False

    def _text(self, messages: Sequence[Message], **variables: Any) -> str | None:
        if self._is_spent():
            return None
        try:
            return self._render(list(messages), **variables)
        except QuireError:
            return None

    def _find_tool_variable(self) -> bool:
        """Whether the template shows tools, under `tools` or another name."""
        tools, user = probe_tools(), [{"role": "user", "content": USER}]
        for name, make in {"tools": list, **TOOL_VARIABLES}.items():
            extra = {} if name == "tools" else {name: make(tools)}
            for more in ({}, {"datetime": "today"}):
                text = self._text(user, tools=tools, **extra, **more)
                if text is not None and FIRST in text:
                    self.tool_variable, self.variables = name, {**extra, **more}
                    return True
        self.tool_variable = None
        return False

    def whole(self, *messages: Message) -> str | None:
        """The whole text of a conversation, without tools."""
        return self._text(messages, add_generation_prompt=False, **self.variables)

    def tail(self, *messages: Message, prompts: bool = False, **variables: Any) -> str | None:
        """The text after the user's message of a conversation that continues with these messages."""
        user = {"role": "user", "content": USER}
        text = self._text(
            [user, *messages],
            tools=probe_tools() if self.has_tools else None,
            add_generation_prompt=prompts,
            **self.variables,
            **variables,
        )
        return None if text is None or USER not in text else text.rpartition(USER)[2]

    def answer(self, thought: str | None = None, **variables: Any) -> str | None:
        return self.tail({"role": "assistant", "content": ANSWER, **_thoughts(thought)}, **variables)

    def prompt(self, **variables: Any) -> str | None:
        """What the generation prompt adds."""
        return self.tail(prompts=True, **variables)

    def calls(self, *calls: tuple[str, Mapping[str, Any]], thought: str | None = None, **variables: Any) -> str | None:
        return self.tail(make_message(calls, self.form, thought), **variables)

    def calls_with(self, fields: Mapping[str, Any], *calls: tuple[str, Mapping[str, Any]], **more: Any) -> str | None:
        """The text of a message with calls and further fields."""
        return self.tail({**make_message(calls, self.form, None), **fields}, **more)

    def choose_form(self) -> bool:
        """Find the form of earlier calls that the template renders with name and values. Returns False if none is."""
        for form in CALL_FORMS:
            self.form = form
            text = self.calls((FIRST, ARGUMENTS))
            if text is not None and all(part in text for part in (FIRST, *VALUES)):
                return True
        self.form = CallForm()
        return False


def make_message(calls: Iterable[tuple[str, Mapping[str, Any]]], form: CallForm, thought: str | None) -> Message:
    made = [
        {
            "id": CALL_IDS[index],
            "type": "function",
            "function": {
                "name": name,
                "arguments": json.dumps(arguments) if form.arguments_as_text else dict(arguments),
            },
        }
        for index, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": form.content, "tool_calls": made, **_thoughts(thought)}


def _thoughts(thought: str | None) -> dict[str, str]:
    return {} if thought is None else dict.fromkeys(REASONING_KEYS, thought)


def probe_result_shown(views: ProbeViews) -> bool:
    """Whether the template shows the result of a tool."""
    result = {"role": "tool", "tool_call_id": CALL_IDS[0], "name": FIRST, "content": ANSWER}
    text = views.tail(make_message([(FIRST, ARGUMENTS)], views.form, None), result)
    return text is not None and ANSWER in text


def probe_system_shown(views: ProbeViews) -> bool:
    """Whether the template shows a system message."""
    text = views.whole({"role": "system", "content": THOUGHT}, {"role": "user", "content": USER})
    return text is not None and THOUGHT in text


def probe_content_beside(views: ProbeViews, key: str | None) -> bool:
    """Whether a message with calls may have content beside its reasoning."""
    if key is None or not views.choose_form():
        return True
    message = {**make_message([(FIRST, ARGUMENTS)], views.form, None), key: THOUGHT}
    return views.tail(message) is None or views.tail({**message, "content": ANSWER}) is not None
