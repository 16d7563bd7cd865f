"""How earlier messages and tools are given to a template: the forms that it was seen to take."""

from __future__ import annotations

from dataclasses import dataclass

from quire.text.channels.probe.views import CallForm


@dataclass(frozen=True, slots=True)
class Replay:
    """The forms in which a template takes tools, calls and reasoning."""

    form: CallForm
    reasoning_key: str | None = "reasoning_content"  # the message's field that the template shows; None: it shows none
    shows_calls: bool = True  # false: calls are written into the content
    shows_tools: bool = True  # false: tools are described in a message
    shows_results: bool = True  # false: a tool's result is given as a user's message
    takes_system: bool = True  # false: the template refuses or drops a system message
    content_beside_thought: bool = True  # false: a message with calls has either content or reasoning
    tool_variable: str = "tools"
