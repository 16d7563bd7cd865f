"""`quire chat -p`: one message, answered with tools, for scripts. The answer goes to stdout, all else to stderr.

Exit codes: 0 answered, 1 failed, 2 wrong usage, 3 a limit ended it, 130 interrupted.
"""

from __future__ import annotations

import os
import stat
import sys
from argparse import Namespace
from typing import Any

from quire.agent.loop.agent import TurnOutcome
from quire.agent.loop.events import ITEM_COMPLETED, Event
from quire.agent.loop.prompt import attach_files
from quire.cli.agent_chat.engine import open_engine
from quire.cli.agent_chat.flags import agent_options
from quire.cli.agent_chat.opening import open_chat
from quire.cli.output import print_dim, print_error, print_note, write_json, write_text
from quire.cli.run import MAX_PROMPT_BYTES, OpenLLM, check_text, not_utf8
from quire.types import QuireError

EXIT_CODES = {"completed": 0, "failed": 1, "limit": 3, "interrupted": 130}


def run_once(args: Namespace, open_llm: OpenLLM) -> int:
    if args.json and args.stream_json:
        raise QuireError("usage", "--json and --stream-json are two forms of output.", "Leave one of them out.")
    options = agent_options(args)
    text = attach_files(_message(args.prompt), options.folder)
    output = OnceOutput(args.json, args.stream_json)
    with open_engine(args, open_llm) as engine, open_chat(args, engine, options, output.take) as opened:
        outcome = opened.agent.take(text)
        output.finish(outcome, opened.agent.session.state.id)
    return EXIT_CODES[outcome.status]


class OnceOutput:
    """Shows a run: events as they come, one object at the end, or the text of the last answer."""

    def __init__(self, as_json: bool, as_stream: bool) -> None:
        self._as_json, self._as_stream = as_json, as_stream
        self._items: list[Any] = []

    def take(self, event: Event) -> None:
        if self._as_stream:
            write_json(event)
        if event["type"] != ITEM_COMPLETED:
            return
        item = event["item"]
        self._items.append(item)
        if item["type"] == "error":
            print_note(item["message"])
        elif "tool" in item:
            code = "" if item.get("exit_code") in (None, 0) else f" · exit code {item['exit_code']}"
            print_dim(f"{item['tool']} {item['command'][:200]} · {item['seconds']:.1f} s{code}")

    def finish(self, outcome: TurnOutcome, session_id: str) -> None:
        if self._as_json:
            usage = {
                "input_tokens": outcome.prompt_tokens,
                "cached_input_tokens": outcome.cached_tokens,
                "output_tokens": outcome.output_tokens,
            }
            head = {"thread_id": session_id, "status": outcome.status, "text": outcome.text}
            error = {"error": outcome.error, "error_code": outcome.error_code} if outcome.error else {}
            write_json({**head, **error, "requests": outcome.requests, "usage": usage, "items": self._items})
        elif not self._as_stream and outcome.text:
            write_text(outcome.text.rstrip("\n") + "\n")
        if outcome.error and not self._as_stream:
            print_error(outcome.error)


def _message(prompt: str) -> str:
    text = check_text(prompt, "the prompt")
    given = _stdin_text()
    if not text.strip() and not given.strip():
        raise QuireError("empty_prompt", "The prompt is empty.", 'Give one: quire chat -p "…".')
    return f"{text}\n\n<stdin>\n{given.rstrip()}\n</stdin>" if given.strip() else text


def _stdin_text() -> str:
    """Returns what a pipe or a file has on stdin. Anything else, such as a terminal, is left alone."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return ""
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return ""
    content = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(content) > MAX_PROMPT_BYTES:
        raise QuireError("invalid_prompt", f"stdin holds more than {MAX_PROMPT_BYTES >> 20} MiB.", "Send less text.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8("stdin", error.start) from None
