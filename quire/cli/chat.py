"""`quire chat`: an agent with tools, or a plain conversation. Uses the public API only.

The agent is in `agent_chat`: one message with `-p`, or a session at a terminal. The plain conversation, through a pipe
or at a terminal with `--plain`, is here. `ChatHistory` holds the turns. `Session` takes messages
(read by `messages`), runs slash commands, streams answers, and drops the oldest turns when the context is full.
"""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.cli.agent_chat.flags import add_agent_flags, wants_agent
from quire.cli.agent_chat.once import run_once
from quire.cli.agent_chat.repl.session import run_repl
from quire.cli.agent_chat.sessions import show_sessions
from quire.cli.messages import Message, Prompt, history_path, join_blocks, line_editing
from quire.cli.model_argument import add_positional_model, take_positional_model
from quire.cli.output import AnswerLines, is_terminal, print_dim, print_error, print_note
from quire.cli.run import (
    OpenLLM,
    add_sampling_flags,
    check_text,
    not_utf8,
    open_llm,
    sampling_params,
    short_name,
    stream_answer,
    summary,
)
from quire.config_build import ENGINE_TABLES, add_config_flags, config_from_args
from quire.types import QuireError, SamplingParams

if TYPE_CHECKING:
    from quire.llm import LLM, Output

HELP = """\
/help          this list
/reset         forget the conversation
/system TEXT   set the system message
/system        show it (/system none removes it)
/stats         turns and tokens so far
/save NAME     keep the conversation and its cache in --cache-dir
/load NAME     go on with a conversation that was kept
/exit          leave (so does Ctrl-D)
A message of several lines stands between \"\"\" and \"\"\"; a paste of several lines is one message.
Ctrl-C stops the current answer or drops the line you are typing; twice on an empty line it leaves."""
MIN_ROOM = 256  # free tokens for an answer; at most a quarter of the context


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "chat",
        usage="quire chat [MODEL] [options]",
        help="work with an agent, or hold a conversation",
        description="Work with an agent at a terminal, or answer one message with -p. If stdin is a pipe, hold a plain "
        'conversation: each line is a turn, and so is each block between """.',
    )
    add_positional_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_flags(parser)
    add_agent_flags(parser)
    add_config_flags(parser, groups=ENGINE_TABLES)


def run(args: Namespace) -> int:
    return chat_command(args, open_llm)


def chat_command(args: Namespace, open_llm: OpenLLM) -> int:
    if args.list_sessions:
        return show_sessions()
    if args.prompt is not None:
        return run_once(args, open_llm)
    if args.json or args.stream_json:
        raise QuireError("usage", "--json and --stream-json need one message.", 'Give it: quire chat -p "…".')
    if args.plain or not (is_terminal(sys.stdin) and is_terminal(sys.stdout)):
        if wants_agent(args):
            what = "The agent needs a terminal or one message."
            raise QuireError("usage", what, 'Give it: quire chat -p "…". --plain has no tools.')
        return plain_chat(args, open_llm)
    return run_repl(args, open_llm)


def plain_chat(args: Namespace, open_llm: OpenLLM) -> int:
    """Hold a conversation without tools."""
    config = config_from_args(take_positional_model(args))
    params = sampling_params(args)
    system = None if args.system is None else check_text(args.system, "--system")
    with open_llm(config) as llm:
        session = Session(llm, params, ChatHistory(system))
        if not is_terminal(sys.stdin):
            return session.read_pipe()
        print_dim(f"{short_name(config)} · /help lists the commands, Ctrl-D leaves")
        with line_editing(history_path()) as readline:
            return session.read_terminal(Prompt(readline))


# ---------------------------------------------------------------------------------------------------------------------
# The conversation


@dataclass(slots=True)
class ChatHistory:
    """The turns of a conversation, with its system message."""

    system: str | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)  # (user message, answer)

    def messages(self, user: str, num_dropped: int = 0) -> list[dict[str, str]]:
        """Return all messages and a new user message for the model, without the oldest `num_dropped` turns."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for said, answered in self.turns[num_dropped:]:
            messages.append({"role": "user", "content": said})
            messages.append({"role": "assistant", "content": answered})
        return [*messages, {"role": "user", "content": user}]

    @classmethod
    def read(cls, messages: list[dict[str, str]]) -> ChatHistory:
        """Return the history with these messages, which `messages` has returned."""
        found = cls()
        for message in messages:
            role, text = message.get("role"), str(message.get("content", ""))
            if role == "system":
                found.system = text
            elif role == "user":
                found.turns.append((text, ""))
            elif role == "assistant" and found.turns:
                found.turns[-1] = (found.turns[-1][0], text)
        return found


# ---------------------------------------------------------------------------------------------------------------------
# The session


@dataclass(slots=True)
class Session:
    """A running `quire chat`: the conversation, its parameters and its counters."""

    llm: LLM
    params: SamplingParams
    conversation: ChatHistory
    last: Output | None = None
    num_turns: int = 0
    num_tokens: int = 0

    def read_pipe(self) -> int:
        """Take each message of stdin as a turn. The first error ends the session, since later turns depend on it."""
        try:
            for message in join_blocks(sys.stdin):
                if not self.take(message):
                    break
        except UnicodeDecodeError as error:
            raise not_utf8("stdin", error.start) from None
        return 0

    def read_terminal(self, prompt: Prompt) -> int:
        interrupted = False
        while True:
            try:
                message = prompt.read()
                interrupted = False
                if not self.take(message):
                    return 0
            except EOFError:
                print(file=sys.stderr)
                return 0
            except KeyboardInterrupt:  # on an empty line; `_stream` handles Ctrl-C during an answer
                if interrupted:
                    raise
                interrupted = True
                print(file=sys.stderr)
                print_dim("Ctrl-C again or Ctrl-D leaves")
            except QuireError as error:
                print_error(error.what, error.hint)

    def take(self, message: Message) -> bool:
        """Run a slash command or answer a message; returns False to end the session. A message of several lines keeps
        the indentation of its first line."""
        text = message.text.strip("\r\n") if "\n" in message.text.strip() else message.text.strip()
        if not message.is_quoted and re.fullmatch(r"/\w+( .*)?", text):
            command, _, rest = text[1:].partition(" ")
            return self.run_command(command, rest.strip())
        if text.strip():
            self.answer(check_text(text, "the message"))
        return True

    def run_command(self, command: str, rest: str) -> bool:
        if command in ("exit", "quit"):
            return False
        if command == "reset":
            self.conversation.turns.clear()
            print_note("the conversation was reset.")
        elif command == "system":
            self._set_system(rest)
        elif command in ("save", "load"):
            (self._save if command == "save" else self._load)(rest)
        elif command == "stats":
            print(self.stats(), file=sys.stderr)
        elif command == "help":
            print(HELP, file=sys.stderr)
        else:
            raise QuireError("unknown_command", f"There is no command /{command}.", "/help lists them.")
        return True

    def answer(self, user: str) -> None:
        self._make_room(user)
        self._stream(user)

    def _stream(self, user: str) -> None:
        """Stream an answer and add the turn. Ctrl-C ends the answer only; its text so far stays in the conversation."""
        finished, interrupted = None, False
        pieces = stream_answer(self.llm, self.conversation.messages(user), self.params)
        with AnswerLines() as answer, closing(pieces):
            try:
                for text, output in pieces:
                    answer.write(text)
                    finished = output or finished
            except KeyboardInterrupt:
                if not is_terminal(sys.stdin):
                    raise
                interrupted = True
        if interrupted:
            if not answer.text or answer.text.endswith("\n"):
                print(file=sys.stderr)  # ends the line on which the terminal shows ^C
            print_dim("stopped" if answer.text else "stopped before any text; the message was dropped")
        if answer.text or finished is not None:
            self.conversation.turns.append((user, answer.text))
        if finished is not None:
            self.last = finished
            self.num_turns += 1
            self.num_tokens += finished.usage.completion_tokens
            print_dim(summary(finished))

    def _make_room(self, user: str) -> None:
        """Drop the oldest turns until the prompt leaves enough of the context for an answer."""
        max_len = self.llm.edge.max_len
        wanted = min(self.params.max_tokens or MIN_ROOM, max_len // 4)
        num_turns = len(self.conversation.turns)
        if self._prompt_len(user, num_turns) >= max_len:
            return  # the message alone does not fit: the engine reports that, and no turn is dropped
        num_dropped = 0
        while num_dropped < num_turns and self._prompt_len(user, num_dropped) + wanted > max_len:
            num_dropped += 1
        if num_dropped:
            del self.conversation.turns[:num_dropped]
            turns = "the oldest turn is" if num_dropped == 1 else f"the {num_dropped} oldest turns are"
            print_note(f"the context ({max_len} tokens) is full, so {turns} dropped.")

    def _prompt_len(self, user: str, num_dropped: int) -> int:
        return len(self.llm.edge.encode_chat(self.conversation.messages(user, num_dropped)))

    # -- commands

    def _set_system(self, text: str) -> None:
        if not text:
            print_note(f"system message: {self.conversation.system or 'none'}")
            return
        self.conversation.system = None if text == "none" else check_text(text, "the system message")
        print_note("system message removed." if text == "none" else "system message set.")

    def _save(self, name: str) -> None:
        if not self.conversation.turns:
            raise QuireError("empty_prompt", "There is no answer to save yet.")
        *messages, _ = self.conversation.messages("")
        saved = self.llm.sessions.save(name, messages)
        print_note(f"saved {name!r} with the cache of {saved.saved_tokens} of its {saved.num_tokens} tokens.")

    def _load(self, name: str) -> None:
        loaded = self.llm.sessions.load(name)
        self.conversation = ChatHistory.read(json.loads(loaded.messages or "[]"))
        turns = len(self.conversation.turns)
        print_note(
            f"loaded {name!r}: {turns} turns, {loaded.ready_tokens} of {loaded.num_tokens} tokens from the cache."
        )

    def stats(self) -> str:
        lines = [
            f"turns      {self.num_turns} answered, {len(self.conversation.turns)} in the context",
            f"generated  {self.num_tokens} tokens",
        ]
        if self.last is not None:
            used = self.last.usage.prompt_tokens + self.last.usage.completion_tokens
            lines.append(f"context    {used} of {self.llm.edge.max_len} tokens after the last answer")
            lines.append(f"last       {summary(self.last)}")
        return "\n".join(lines)
