"""Chat turns: a conversation with tools becomes a prompt, and the model's answer becomes a message with tool calls.

The HTTP server and `LLM.chat` use it alike. It imports no torch and nothing of the server, and raises `QuireError`.
`request` has what a caller wants answered, `turn` renders it, `answer` reads what the model wrote.
"""

from quire.text.conversation.answer import AnswerFormat, AssistantMessage, ToolCall
from quire.text.conversation.request import (
    TEMPLATE_KWARGS,
    Conversation,
    ConversationLimits,
    Message,
    make_conversation,
)
from quire.text.conversation.turn import ChatRenderer, ChatTurn, answer_format, choose_tool_format

__all__ = [
    "TEMPLATE_KWARGS",
    "AnswerFormat",
    "AssistantMessage",
    "ChatRenderer",
    "ChatTurn",
    "Conversation",
    "ConversationLimits",
    "Message",
    "ToolCall",
    "answer_format",
    "choose_tool_format",
    "make_conversation",
]
