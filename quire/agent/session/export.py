"""A session as a document: Markdown for people, JSON for programs."""

from __future__ import annotations

import json
import time
from typing import Any

from quire.agent.session.records import Record, SessionState

FORMATS = ("md", "json")


def export_session(state: SessionState, form: str) -> str:
    """Returns the whole conversation, with what a summary replaced."""
    return _as_json(state) if form == "json" else _as_markdown(state)


def _as_json(state: SessionState) -> str:
    whole: dict[str, Any] = {
        "id": state.id,
        "created": state.created,
        "folder": state.folder,
        "model": state.model,
        "system": state.system,
        "messages": state.messages,
        "usage": {
            "prompt_tokens": state.prompt_tokens,
            "cached_tokens": state.cached_tokens,
            "output_tokens": state.output_tokens,
        },
    }
    return json.dumps(whole, ensure_ascii=False, indent=2) + "\n"


def _as_markdown(state: SessionState) -> str:
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(state.created))
    parts = [f"# Session {state.id}", f"{state.model} in `{state.folder}`, {day}"]
    for message in state.messages:
        parts += _message_parts(message)
    return "\n\n".join(parts) + "\n"


def _message_parts(message: Record) -> list[str]:
    role, content = message.get("role"), str(message.get("content") or "").strip()
    if role == "tool":
        return [f"Result of `{message.get('name') or 'a call'}`:", _fenced(content)]
    parts = [f"## {'User' if role == 'user' else 'Assistant'}"]
    reasoning = str(message.get("reasoning_content") or "").strip()
    if reasoning:
        parts.append("\n".join(f"> {line}".rstrip() for line in reasoning.splitlines()))
    if content:
        parts.append(content)
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        parts += [f"Call of `{function.get('name')}`:", _fenced(str(function.get("arguments")), "json")]
    return parts


def _fenced(text: str, language: str = "") -> str:
    """Returns the text in a fence that is longer than any in it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"
