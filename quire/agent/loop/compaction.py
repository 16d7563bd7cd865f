"""Makes room when the context fills: the model sums up the old turns, and the last ones stay as they are.

The request for the summary continues the conversation as it is, so that its prefix is in the engine's cache. All
messages stay in the session's file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from quire.agent.session.records import Record, SessionState, is_from_user

KEPT_TURNS = 2
CHARACTERS_PER_TOKEN = 3  # a low guess, where the engine can't count
ASK_FOR_SUMMARY = (
    "Write a summary of this conversation for yourself, since the earlier messages will be removed. Keep: what the "
    "user wants, decisions, files and what was changed in them, commands and their outcome, and what is left to do. "
    "Do not call a tool. Write only the summary."
)


def estimate_tokens(messages: Sequence[Record], tools: Sequence[dict[str, Any]]) -> int:
    size = len(json.dumps(list(messages), ensure_ascii=False)) + len(json.dumps(list(tools), ensure_ascii=False))
    return size // CHARACTERS_PER_TOKEN


def cut_place(state: SessionState, kept_turns: int = KEPT_TURNS) -> int | None:
    """Returns how many messages a summary may replace: all before the last `kept_turns` turns. Where one turn alone
    fills the context, its own older steps go too. None: nothing can be replaced."""
    begins = [
        index for index, message in enumerate(state.messages) if index > state.summarized and is_from_user(message)
    ]
    if len(begins) >= kept_turns:
        return begins[-kept_turns]
    if begins:
        return begins[-1]
    steps = [
        index
        for index, message in enumerate(state.messages)
        if index > state.summarized and message.get("role") == "assistant"
    ]
    return steps[-1] if len(steps) > 1 else None


def shorten_results(messages: Sequence[Record], most: int) -> list[Record]:
    """Returns the messages with long results of tools cut, for a summary of a conversation that is itself too long."""
    from quire.agent.sandbox.output import trim_text

    return [
        {**message, "content": trim_text(str(message.get("content") or ""), most)}
        if message.get("role") == "tool"
        else message
        for message in messages
    ]
