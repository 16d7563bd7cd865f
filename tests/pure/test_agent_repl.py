"""The agent at a terminal without a terminal: prepared messages go in, what is shown is read back."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from quire.agent.assemble import AgentOptions, open_agent
from quire.agent.engines.seam import ModelAnswer, ModelCall
from quire.agent.loop.agent import Agent
from quire.cli.agent_chat.repl.approval import ApprovalPrompt
from quire.cli.agent_chat.repl.commands import COMMANDS
from quire.cli.agent_chat.repl.completion import complete_line
from quire.cli.agent_chat.repl.markdown import split_blocks
from quire.cli.agent_chat.repl.screen import Screen
from quire.cli.agent_chat.repl.session import ReplSession
from quire.cli.messages import Message
from quire.types import QuireError
from tests.pure.scripted_engine import Prepared, ScriptedEngine, calling
from tests.pure.test_agent_loop import Echo


class PlayedReader:
    """Implements `LineReader`: messages or exceptions, then the end of input."""

    def __init__(self, *lines: str | Message | BaseException) -> None:
        self.lines = list(lines)

    def read(self) -> Message:
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line if isinstance(line, Message) else Message(line)


class Played:
    def __init__(self, agent: Agent, engine: ScriptedEngine, screen: Screen, folder: Path) -> None:
        self.agent, self.engine = agent, engine
        self.repl = ReplSession(agent, screen, folder)
        self._shown = screen.console.file

    def type(self, *lines: str | Message | BaseException) -> str:
        """Returns what is shown of these messages."""
        before = len(self._shown.getvalue())  # type: ignore[attr-defined]
        assert self.repl.read_all(PlayedReader(*lines)) == 0
        return str(self._shown.getvalue()[before:])  # type: ignore[attr-defined]

    def contents(self, index: int = -1) -> list[str]:
        return [f"{one['role'][0]}:{one.get('content') or ''}" for one in self.engine.asked[index].messages]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)

    @contextmanager
    def opened(
        answers: list[Prepared], *tools: Echo, replies: tuple[str, ...] = (), **options: Any
    ) -> Iterator[Played]:
        engine = ScriptedEngine(answers)
        screen = Screen(Console(file=io.StringIO(), width=80, highlight=False))
        said = list(replies)
        ask = ApprovalPrompt(screen, lambda question: said.pop(0))
        chosen = AgentOptions(folder=project, tools=["none"], own_tools=tools, **options)
        with open_agent(engine, chosen, emit=screen.take, ask=ask) as agent:
            yield Played(agent, engine, screen, project)
        assert not said

    yield opened


def test_an_answer_is_shown_as_markdown_and_reasoning_before_it(play: Any) -> None:
    with play([ModelAnswer("# Title\n\nSome **bold** words\n\n- one\n- two", "let me see\nyes")]) as played:
        shown = played.type("hello")
    assert "let me see\nyes\n" in shown and "Title" in shown and "Some bold words" in shown and "• one" in shown
    assert "**" not in shown and "#" not in shown


def test_reasoning_can_be_hidden(play: Any) -> None:
    with play([ModelAnswer("yes", "secret thoughts"), ModelAnswer("no", "other thoughts")]) as played:
        assert "secret" not in played.type("/reasoning hide", "hello")
        assert "other thoughts" in played.type("/reasoning show", "hello")


def test_escape_sequences_of_a_model_do_not_reach_the_terminal(play: Any) -> None:
    answer = ModelAnswer("a\x1b[2Jb \x9b31m", "t\x1b]0;title\x07", [ModelCall("echo", '{"text": "\\u001b[2Jx"}', "c0")])
    with play([answer, "done"], Echo(), replies=("y",)) as played:
        shown = played.type("hello")
    assert "\x1b" not in shown and "\x9b" not in shown and "\x07" not in shown and "[2Jx" in shown


@pytest.mark.parametrize(
    ("reply", "ran", "told"),
    [("y", ["a"], "echo a"), ("n", [], "not allow"), ("", [], "not allow"), ("use b", [], "this call: use b")],
)
def test_an_approval_is_asked_and_anything_but_yes_is_no(play: Any, reply: str, ran: list[str], told: str) -> None:
    tool = Echo()
    with play([calling(("echo", {"text": "a"})), "done"], tool, replies=(reply,)) as played:
        shown = played.type("go")
        assert told in played.contents()[-1]
    assert tool.ran == ran and "echo wants to run OUTSIDE the sandbox:\n  a\n" in shown
    assert "● echo a · " in shown


def test_an_approval_for_the_session_is_listed_and_forgotten(play: Any) -> None:
    answers = [calling(("echo", {"text": str(index)}), ids=f"i{index}") for index in range(3)]
    with play([*answers[:2], "ok", answers[2], "ok"], Echo(), replies=("s", "y")) as played:
        assert "approved for this session: echo" in played.type("go", "/permissions")
        assert "approved for" not in played.type("/permissions forget", "/permissions")
        played.type("again")  # asks again


def test_every_command_of_the_list_is_there_and_runs(play: Any) -> None:
    wanted = (
        "help reset tools model system stats context compact undo retry save load sessions export permissions mcp exit"
    )
    assert set(wanted.split()) <= set(COMMANDS)
    with play(["one", "two", "three"], Echo()) as played:
        shown = played.type("/help")
        assert all(f"/{name}" in shown for name in COMMANDS)
        assert "echo" in played.type("/tools") and "scripted (in use)" in played.type("/model")
        played.type("first", "/system Be kind", "/retry")
        assert played.contents() == ["s:Be kind", "u:first"]
        assert "1 turns" in played.type("/undo", "/stats") or "2 turns" in played.type("/stats")
        assert "messages   0 shown" in played.type("/context")
        played.type("/reset", "third", "/exit", "never read")
        assert played.contents() == ["s:Be kind", "u:third"]


def test_errors_of_commands_leave_the_session(play: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with play(["fine"]) as played:
        shown = played.type("/nonsense", "/load nothing", "/load", "/reasoning loud", "/undo", "/model other", "hello")
    errors = capsys.readouterr().err
    assert "no command /nonsense" in errors and "no session 'nothing'" in errors and "show or hide" in errors
    assert "fine" in shown


def test_a_session_is_exported_saved_and_loaded(play: Any, tmp_path: Path) -> None:
    with play([calling(("echo", {"text": "a"})), "**done**"], Echo(), replies=("y",)) as played:
        played.type("do it", "/export out.md", "/export json out.json", "/save copy.jsonl")
        again = played.agent.session.state.id
        markdown = (tmp_path / "project" / "out.md").read_text()
        assert "## User\n\ndo it" in markdown and "**done**" in markdown and '{"text": "a"}' in markdown
        whole = json.loads((tmp_path / "project" / "out.json").read_text())
        assert whole["id"] == again and [one["role"] for one in whole["messages"]][:2] == ["user", "assistant"]
    with play(["and on"]) as played:
        assert again in played.type("/sessions")
        played.type(f"/load {again[:-2]}", "go on")
        assert played.contents()[1:] == ["u:do it", "a:", "t:echo a", "a:**done**", "u:go on"]
        played.type("/load copy.jsonl")
        assert len(played.agent.session.state.messages) == 4


def test_files_are_attached_and_quoted_text_is_no_command(play: Any, tmp_path: Path) -> None:
    (tmp_path / "project" / "notes.txt").write_text("some notes")
    with play(["a", "b"]) as played:
        played.type("see @notes.txt", Message("/reset", is_quoted=True))
        assert '<file path="notes.txt">\nsome notes\n</file>' in played.contents(0)[-1]
        assert played.contents()[-1] == "u:/reset"


def test_ctrl_c_twice_on_an_empty_line_leaves(play: Any) -> None:
    with play(["a"]) as played:
        played.type(KeyboardInterrupt(), "hello", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            played.repl.read_all(PlayedReader(KeyboardInterrupt(), KeyboardInterrupt()))


def test_a_session_in_which_nothing_was_said_leaves_no_file(play: Any, tmp_path: Path) -> None:
    with play([]) as played:
        path = played.agent.session.path
        assert path.exists()
    assert not path.exists()
    with play(["hi"]) as played:
        played.type("hello", "/reset")
        path = played.agent.session.path
    assert path.exists()


def test_the_status_line_has_model_context_speed_and_cache(play: Any) -> None:
    with play(["one two three four", "more and more"]) as played:
        played.type("hello there", "and again")
        text = played.repl.status.text()
    assert text.startswith("scripted · context ") and " of 100000 " in text and "tok/s" in text and "cache hit" in text


# -- Markdown in pieces


@pytest.mark.parametrize(
    ("text", "blocks", "rest"),
    [
        ("one\n\ntwo\n", ["one\n\n"], "two\n"),
        ("one\n\n2. t", [], "one\n\n2. t"),
        ("one\ntwo\n", [], "one\ntwo\n"),
        ("# head\nbody\n\nmore\n", ["# head\nbody\n\n"], "more\n"),
        ("```\na\n\nb\n```\nafter", ["```\na\n\nb\n```\n"], "after"),
        ("```\na\n\nb\n", [], "```\na\n\nb\n"),
        ("````\n```\nx\n```\n````\n", ["````\n```\nx\n```\n````\n"], ""),
        ("1. a\n\n2. b\n\n   more\n\nend\n", ["1. a\n\n2. b\n\n   more\n\n"], "end\n"),
    ],
)
def test_blocks_are_cut_where_markdown_ends_them(text: str, blocks: list[str], rest: str) -> None:
    assert split_blocks(text) == (blocks, rest)


def test_blocks_are_the_same_however_the_text_arrives() -> None:
    text = "# A\nsome text\n\n1. x\n\n2. y\n\n```py\na = 1\n\nb = 2\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nend\n"
    whole, tail = split_blocks(text)
    for size in (1, 2, 3, 7, 50):
        got, rest = [], ""
        for start in range(0, len(text), size):
            blocks, rest = split_blocks(rest + text[start : start + size])
            got += blocks
        assert [one.strip() for one in got] == [one.strip() for one in whole] and rest == tail
    assert "".join([*whole, tail]).replace("\n\n", "\n").split() == text.split()
    assert tail == "end\n"


# -- completion


def test_commands_and_paths_are_completed(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for name in ("src/main.py", "src/more.py", "setup.py", ".hidden", "two words"):
        (tmp_path / name).write_text("x")

    def choices(before: str) -> list[str]:
        return [before[: len(before) - one.replaced] + one.text for one in complete_line(before, tmp_path, COMMANDS)]

    assert choices("/re") == ["/reset", "/retry", "/reasoning"]
    assert choices("look at @s") == ["look at @setup.py", "look at @src/"]
    assert choices("look at @src/m") == ["look at @src/main.py", "look at @src/more.py"]
    assert choices("@.h") == ["@.hidden"]
    assert choices("@../") == [] and choices("mail me@s") == [] and choices("@t") == [] and choices("") == []


def test_the_agent_wants_a_terminal_or_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.pure.fake_llm import FakeLLM
    from tests.pure.test_cli_chat import chat

    with pytest.raises(QuireError, match="needs a terminal"):
        chat(FakeLLM([]), "hello\n", "--url", "http://127.0.0.1:1")
