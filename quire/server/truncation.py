"""`truncation: auto`: leaves the oldest turns out of a conversation that does not fit the context.

The routes of chat and responses call `make_prompt`; the usage of the reply says how many messages were left out.
"""

from __future__ import annotations

from dataclasses import replace

from quire.server.chat import ChatPrompts
from quire.text.conversation import ChatTurn, Conversation, Message
from quire.types import PromptTooLong

MAX_ROOM = 0.5  # maximum share of the context kept free for the answer of a truncated conversation
DEFAULT_ROOM = 0.25  # share of the context kept free if the client sets no length


async def make_prompt(
    chat: ChatPrompts, conversation: Conversation, *, truncate: bool, max_tokens: int | None
) -> tuple[ChatTurn, int]:
    """The prompt of a conversation, and how many of its messages were left out. Without `truncate` none are, and a
    conversation that does not fit raises `PromptTooLong`."""
    try:
        return await chat.make(conversation), 0
    except PromptTooLong:
        starts = _starts(conversation.messages) if truncate else []
        if not starts:
            raise
    room = min(chat.max_prompt * MAX_ROOM, max_tokens or chat.max_prompt * DEFAULT_ROOM)
    lead = _lead(conversation.messages)
    found: tuple[ChatTurn, int] | None = None
    low, high = 0, len(starts) - 1
    while low <= high:  # the fewest turns to leave out; the last turn may take all the room there is
        middle = (low + high) // 2
        is_last = middle == len(starts) - 1
        shorter = [*conversation.messages[:lead], *conversation.messages[starts[middle] :]]
        try:
            turn = await chat.make(replace(conversation, messages=shorter), room=0 if is_last else int(room))
            found, high = (turn, starts[middle] - lead), middle - 1
        except PromptTooLong:
            if is_last:
                raise
            low = middle + 1
    assert found is not None  # the last one was found, or has raised
    return found


def _lead(messages: list[Message]) -> int:
    """The number of system messages at the beginning, which are always kept."""
    return next((index for index, message in enumerate(messages) if message.get("role") != "system"), len(messages))


def _starts(messages: list[Message]) -> list[int]:
    """Where a shorter conversation may begin: at a message of the user, so that no call loses its result."""
    lead = _lead(messages)
    return [index for index, message in enumerate(messages) if index > lead and message.get("role") == "user"]
