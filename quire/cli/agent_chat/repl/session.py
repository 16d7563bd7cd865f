"""The agent at a terminal: reads messages, runs slash commands, and shows what the agent does with the rest."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from pathlib import Path

from quire.agent.loop.agent import Agent
from quire.agent.loop.prompt import attach_files
from quire.agent.mcp.host import McpHost
from quire.agent.session.records import is_from_user
from quire.cli.agent_chat.engine import open_engine
from quire.cli.agent_chat.flags import agent_options
from quire.cli.agent_chat.opening import open_chat
from quire.cli.agent_chat.repl.approval import ApprovalPrompt
from quire.cli.agent_chat.repl.commands import COMMANDS, find_command
from quire.cli.agent_chat.repl.completion import complete_line
from quire.cli.agent_chat.repl.line_editor import LineReader, open_line_reader
from quire.cli.agent_chat.repl.screen import Screen
from quire.cli.agent_chat.repl.status import StatusLine
from quire.cli.messages import Message
from quire.cli.output import one_line, print_dim, print_error, print_note, printable
from quire.cli.run import OpenLLM, check_text
from quire.types import QuireError

_COMMAND = re.compile(r"/\w+(\s.*)?", re.DOTALL)


def run_repl(args: Namespace, open_llm: OpenLLM) -> int:
    options = agent_options(args)
    screen = Screen()
    screen.shows_reasoning = not args.hide_reasoning
    asks = ApprovalPrompt(screen)
    with (
        open_engine(args, open_llm) as engine,
        open_chat(args, engine, options, screen.take, asks) as opened,
    ):
        agent = opened.agent
        repl = ReplSession(agent, screen, options.folder, opened.mcp)
        print_dim(f"{engine.name} in {agent.session.state.folder} · /help lists the commands, Ctrl-D leaves")
        if options.resume is not None:
            repl.greet_resumed()
        with open_line_reader(
            lambda before: complete_line(before, options.folder, COMMANDS), lambda: repl.status.text()
        ) as reader:
            return repl.read_all(reader)


class ReplSession:
    """One run of the agent at a terminal."""

    def __init__(self, agent: Agent, screen: Screen, folder: Path, mcp: McpHost | None = None) -> None:
        self.agent, self.screen, self.mcp = agent, screen, mcp
        self.status = StatusLine()
        self.is_over = False
        self._folder = folder
        self.status.update(agent)

    def read_all(self, reader: LineReader) -> int:
        """Takes messages until the user leaves."""
        was_interrupted = False
        while not self.is_over:
            try:
                message = reader.read()
                was_interrupted = False
                self.take(message)
            except EOFError:
                print(file=sys.stderr)
                return 0
            except KeyboardInterrupt:  # on an empty line; the agent handles Ctrl-C during a turn
                self.screen.settle()
                if was_interrupted:
                    raise
                was_interrupted = True
                print_dim("Ctrl-C again or Ctrl-D leaves")
            except QuireError as error:
                self.screen.settle()
                print_error(error.what, error.hint)
        return 0

    def take(self, message: Message) -> None:
        """Runs a slash command, or lets the agent work on a message."""
        text = message.text.strip()
        if not message.is_quoted and _COMMAND.fullmatch(text):
            name, _, rest = text[1:].partition(" ")
            find_command(name.strip()).run(self, rest.strip())
            self.status.update(self.agent)
        elif text:
            kept = message.text.strip("\r\n") if "\n" in text else text
            self.answer(attach_files(check_text(kept, "the message"), self._folder))

    def answer(self, text: str) -> None:
        outcome = self.agent.take(text)
        self.screen.settle()
        self.status.update(self.agent, outcome)

    def show(self, text: str) -> None:
        self.screen.console.print(printable(text), markup=False, soft_wrap=True)

    def greet_resumed(self) -> None:
        """Says which session goes on, and shows how it ended."""
        state = self.agent.session.state
        said = [message for message in state.messages if message.get("role") in ("user", "assistant")]
        print_note(f"session {state.id} goes on: {state.num_turns} turns, {len(state.messages)} messages.")
        for message in said[-2:]:
            mark = ">" if is_from_user(message) else " "
            words = one_line(str(message.get("content") or ""))
            if words:
                print_dim(f"{mark} {words[:300]}")
        self.status.update(self.agent)
