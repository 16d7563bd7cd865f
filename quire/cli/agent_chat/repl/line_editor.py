"""Reads messages at a terminal: with prompt_toolkit where it is installed, else with Python's readline.

Both readers raise EOFError at the end of input, and KeyboardInterrupt for Ctrl-C on an empty line.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from quire.agent.session.store import state_folder
from quire.cli.agent_chat.repl.completion import CompletionChoice
from quire.cli.messages import Message, Prompt, check_length, is_closed, line_editing, opens_block, unquote

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completion

Complete = Callable[[str], list[CompletionChoice]]


class LineReader(Protocol):
    """Reads one message of the user."""

    def read(self) -> Message: ...


@contextmanager
def open_line_reader(complete: Complete, status: Callable[[], str]) -> Iterator[LineReader]:
    """Yields the best reader that is installed."""
    if find_spec("prompt_toolkit") is not None and os.environ.get("TERM") != "dumb":
        yield ToolkitReader(complete, status, state_folder() / "agent_history")
        return
    with line_editing(state_folder() / "chat_history") as readline:
        yield StatusPrompt(Prompt(readline), status)


class StatusPrompt:
    """The plain reader, with the status as a line of its own above the prompt."""

    def __init__(self, prompt: Prompt, status: Callable[[], str]) -> None:
        self._prompt, self._status = prompt, status

    def read(self) -> Message:
        from quire.cli.output import print_dim

        print_dim(self._status())
        return self._prompt.read()


class ToolkitReader:
    """Line editing with history, completion, messages of several lines, and the status below."""

    def __init__(self, complete: Complete, status: Callable[[], str], history: Path, **options: Any) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.formatted_text import to_plain_text
        from prompt_toolkit.history import FileHistory, InMemoryHistory

        try:
            history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            history.touch(mode=0o600)
            kept: Any = FileHistory(str(history))
        except OSError:  # a read-only home directory keeps no history
            kept = InMemoryHistory()
        self._session: Any = PromptSession(
            history=kept,
            completer=cast(Any, _ToolkitCompleter(complete)),
            complete_while_typing=False,
            multiline=True,
            prompt_continuation=lambda width, number, wrapped: "… ",
            key_bindings=_key_bindings(),
            bottom_toolbar=lambda: to_plain_text(status()),
            enable_open_in_editor=True,
            **options,
        )

    def read(self) -> Message:
        while True:
            try:
                text = self._session.prompt("> ")
            except KeyboardInterrupt:
                if self._session.default_buffer.text:
                    continue  # the line is dropped
                raise
            check_length([text])
            return unquote(text) if opens_block(text) and is_closed(text.splitlines()) else Message(text)


class _ToolkitCompleter:
    """A completer by its methods; the base class is not there where prompt_toolkit is not installed."""

    def __init__(self, complete: Complete) -> None:
        self._complete = complete

    def get_completions(self, document: Any, event: Any) -> Iterator[Completion]:
        from prompt_toolkit.completion import Completion

        for choice in self._complete(document.text_before_cursor):
            yield Completion(choice.text, start_position=-choice.replaced)

    async def get_completions_async(self, document: Any, event: Any) -> AsyncIterator[Completion]:
        for completion in self.get_completions(document, event):
            yield completion


def _key_bindings() -> Any:
    """Enter sends, Alt-Enter and Ctrl-J begin a new line; inside an open block of triple quotes Enter does too."""
    from prompt_toolkit.key_binding import KeyBindings

    keys: Any = KeyBindings()

    def send(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.complete_state is not None and buffer.complete_state.current_completion is not None:
            buffer.complete_state = None
            return
        lines = buffer.text.splitlines() or [""]
        if opens_block(lines[0]) and not is_closed(lines):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    def new_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    keys.add("enter")(send)
    keys.add("escape", "enter")(new_line)
    keys.add("c-j")(new_line)
    return keys
