"""Chat turns: a conversation with tools becomes a prompt, and the model's answer becomes a message with tool calls.

The HTTP server and `LLM.chat` use this package. It imports neither torch nor the server, and raises `QuireError`.
`request` holds the conversation, `turn` renders it as a prompt, `answer` parses the model's text.
"""

from quire.text.conversation.answer import AnswerFormat, AssistantMessage, ToolCall
from quire.text.conversation.request import (
    TEMPLATE_KWARGS,
    Conversation,
    ConversationLimits,
    Message,
    make_conversation,
)
from quire.text.conversation.turn import ChatRenderer, ChatTurn, answer_format, read_formats

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
    "make_conversation",
    "read_formats",
]
