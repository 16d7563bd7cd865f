"""`quire chat` fed through a pipe: turns, commands, and what happens when the context is full."""

from __future__ import annotations

import io
import os
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest

from quire.cli import chat as command
from quire.cli import messages
from quire.config import Config
from quire.types import QuireError
from tests.pure.fake_llm import FakeLLM


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def chat(llm: FakeLLM, text: str, *argv: str) -> int:
    parser = ArgumentParser()
    command.add_parser(parser.add_subparsers())
    sys.stdin = io.TextIOWrapper(io.BytesIO(text.encode("utf-8", "surrogateescape")), "utf-8")
    try:
        args = parser.parse_args(["chat", *argv])
        return command.chat_command(args, lambda config: llm)  # type: ignore[arg-type, return-value]
    finally:
        sys.stdin = sys.__stdin__


def contents(messages: list[dict[str, str]]) -> list[str]:
    return [f"{message['role'][0]}:{message['content']}" for message in messages]


def test_each_line_is_a_turn_that_remembers_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM([["Hello", " Ada"], ["You are Ada\n"]])
    assert chat(llm, "I am Ada\n\nWho am I?\n", "--system", "Be kind") == 0
    assert capsys.readouterr().out == "Hello Ada\nYou are Ada\n"
    assert contents(llm.asked[0]) == ["s:Be kind", "u:I am Ada"]
    assert contents(llm.asked[1]) == ["s:Be kind", "u:I am Ada", "a:Hello Ada", "u:Who am I?"]
    assert llm.is_closed


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('"""\nfirst\n\n  second\n"""\n', "first\n\n  second"),
        ('"""first\nsecond"""\n', "first\nsecond"),
        ('"""one line"""\n', "one line"),
        ('  """\r\n/reset\r\n"""\r\n', "/reset"),
    ],
)
def test_what_stands_between_triple_quotes_is_one_turn(
    lines: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = FakeLLM([["a"], ["b"]])
    assert chat(llm, f"{lines}next\n") == 0
    assert contents(llm.asked[0]) == [f"u:{message}"]
    assert contents(llm.asked[1])[-1] == "u:next"


def test_an_open_block_at_the_end_of_a_pipe_is_an_error() -> None:
    llm = FakeLLM([["a"]])
    with pytest.raises(QuireError, match="ends inside a block") as caught:
        chat(llm, '"""\nhalf\n')
    assert '"""' in caught.value.hint and not llm.asked


def test_a_block_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_CHARACTERS", 100)
    with pytest.raises(QuireError, match="more than 100 characters"):
        chat(FakeLLM([]), '"""\n' + "x" * 99 + "\n")


def test_the_model_may_be_named_without_a_flag() -> None:
    parser = ArgumentParser()
    command.add_parser(parser.add_subparsers())
    seen: list[str] = []

    def open_llm(config: Config) -> FakeLLM:
        seen.append(config.model.model)
        raise QuireError("stop", "Seen enough.")

    with pytest.raises(QuireError, match="Seen enough"):
        command.chat_command(parser.parse_args(["chat", "some/model"]), open_llm)  # type: ignore[arg-type]
    assert seen == ["some/model"]


def test_sampling_flags_hold_for_every_turn(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM([["a"], ["b"]])
    chat(llm, "one\ntwo\n", "--temperature", "0", "--max-tokens", "9")
    assert [(params.temperature, params.max_tokens) for params in llm.params] == [(0, 9), (0, 9)]


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM([["one"], ["two"], ["three"]])
    lines = ["a", "/reset", "/system Speak Latin", "b", "/system", "/system none", "/stats", "/help", "c", "/exit", "d"]
    assert chat(llm, "\n".join(lines)) == 0
    captured = capsys.readouterr()
    assert captured.out == "one\ntwo\nthree\n"
    assert [contents(messages) for messages in llm.asked] == [
        ["u:a"],
        ["s:Speak Latin", "u:b"],
        ["u:b", "a:two", "u:c"],
    ]
    assert "system message: Speak Latin" in captured.err
    assert "2 answered, 1 in the context" in captured.err
    assert "/reset" in captured.err


def test_a_path_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM([["a file"]])
    chat(llm, "/etc/hosts is what?\n")
    assert contents(llm.asked[0]) == ["u:/etc/hosts is what?"]


def test_an_unknown_command_is_an_error_that_ends_a_pipe() -> None:
    with pytest.raises(QuireError, match="/rest") as caught:
        chat(FakeLLM([]), "/rest\n")
    assert caught.value.hint == "/help lists them."


def test_a_failed_turn_ends_a_pipe_and_closes_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM([["half", QuireError("failed", "It failed.")], ["never"]])
    with pytest.raises(QuireError, match="It failed"):
        chat(llm, "a\nb\n")
    assert capsys.readouterr().out == "half\n"
    assert llm.is_closed and len(llm.asked) == 1


def test_ctrl_c_ends_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM([["half", KeyboardInterrupt()]])
    with pytest.raises(KeyboardInterrupt):
        chat(llm, "a\nb\n")
    assert llm.is_closed and llm.num_ended_early == 1


def test_stdin_must_be_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(QuireError) as caught:
        chat(FakeLLM([["ok"]]), "a\n\udcff\n")
    assert caught.value.code == "invalid_prompt"


# -- messages from a terminal, without one


class Typist:
    """Readline and `input` with prepared lines; Ctrl-C with something typed is an exception with that text."""

    def __init__(self, *lines: str | BaseException):
        self.lines = list(lines)
        self.prompts: list[str] = []
        self.history: list[str] = []
        self.buffer = ""

    def ask(self, prompt: str) -> str:
        self.prompts.append(prompt)
        line = self.lines.pop(0)
        if isinstance(line, BaseException):
            self.buffer = str(line)
            raise line
        return line

    def get_line_buffer(self) -> str:
        return self.buffer

    def get_current_history_length(self) -> int:
        return len(self.history)

    def get_history_item(self, index: int) -> str | None:
        return self.history[index - 1] if self.history else None

    def add_history(self, entry: str) -> None:
        self.history.append(entry)


@pytest.fixture(autouse=True)
def nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stdin is while the tests run."""
    monkeypatch.setattr(messages, "_has_more_input", lambda: False)


def test_ctrl_c_drops_a_typed_line_and_leaves_an_empty_one_to_the_caller(capsys: pytest.CaptureFixture[str]) -> None:
    typist = Typist(KeyboardInterrupt("half a li"), '"""', "one", KeyboardInterrupt(""), "hello", KeyboardInterrupt(""))
    prompt = messages.Prompt(typist, typist.ask)
    assert prompt.read() == messages.Message("hello")
    assert not typist.lines[1:]
    with pytest.raises(KeyboardInterrupt):
        prompt.read()
    assert typist.history == ["hello"]


def test_without_bracketed_paste_lines_that_wait_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    typist = Typist("one", "two", "three", "apart")
    waiting = iter([True, True, False, False])
    monkeypatch.setattr(messages, "_has_more_input", lambda: next(waiting))
    prompt = messages.Prompt(None, typist.ask)
    assert [prompt.read().text, prompt.read().text] == ["one\ntwo\nthree", "apart"]


def test_an_entry_is_remembered_once() -> None:
    typist = Typist("a", "a", '"""', "b", '"""', "  ")
    prompt = messages.Prompt(typist, typist.ask)
    assert [prompt.read().text for _ in range(4)] == ["a", "a", "b", "  "]
    assert typist.history == ["a", '"""\nb\n"""']


# -- a full context


def words(count: int) -> str:
    return " ".join(["word"] * count)


def first_words(llm: FakeLLM) -> list[list[str]]:
    return [[text[2] for text in contents(messages) if text.startswith("u")] for messages in llm.asked]


def test_oldest_turns_go_with_a_notice_before_the_context_is_full(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM([[words(20)] for _ in range(4)], max_model_len=92)  # an answer should find 23 tokens free
    assert chat(llm, "\n".join(f"{name} {words(9)}" for name in "abcd")) == 0
    assert first_words(llm) == [["a"], ["a", "b"], ["b", "c"], ["c", "d"]]
    notices = capsys.readouterr().err.splitlines()
    assert notices == ["quire: note: the context (92 tokens) is full, so the oldest turn is dropped."] * 2


def test_only_as_many_turns_go_as_must(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM([[words(20)] for _ in range(4)], max_model_len=93)  # 60 + 10 + 23: just enough
    chat(llm, "\n".join(f"{name} {words(9)}" for name in "abc") + f"\nd {words(39)}")
    assert first_words(llm) == [["a"], ["a", "b"], ["a", "b", "c"], ["c", "d"]]
    assert "the 2 oldest turns are dropped" in capsys.readouterr().err


def test_a_wish_for_long_answers_makes_more_room(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM([[words(20)] for _ in range(2)], max_model_len=400)
    chat(llm, f"a {words(270)}\nb\n", "--max-tokens", "110")
    assert first_words(llm) == [["a"], ["a", "b"]]  # but never more than a quarter of the context
    llm = FakeLLM([[words(20)] for _ in range(2)], max_model_len=400)
    chat(llm, f"a {words(279)}\nb\n", "--max-tokens", "110")
    assert first_words(llm) == [["a"], ["b"]]


def test_a_message_that_never_fits_is_refused_and_nothing_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM([["ok"]], max_model_len=50)
    with pytest.raises(QuireError) as caught:
        chat(llm, "hi\n" + words(60) + "\n")
    assert caught.value.code == "prompt_too_long"
    assert "dropped" not in capsys.readouterr().err


# -- history


def test_history_lies_in_the_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert messages.history_path() == tmp_path / "quire" / "chat_history"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert messages.history_path() == tmp_path / "me" / ".local" / "state" / "quire" / "chat_history"


@pytest.mark.skipif(sys.platform == "win32", reason="modes are of POSIX")
def test_history_is_kept_and_private(tmp_path: Path) -> None:
    readline = pytest.importorskip("readline")
    path = tmp_path / "a" / "history"
    readline.clear_history()
    entries = ["hello", "two\nlines", "C:\\new \\\\n", "\u2028 cut"]
    with messages.line_editing(path):
        for entry in entries:
            readline.add_history(entry)
    assert path.read_text("utf-8").startswith("hello\ntwo\\nlines\n")
    assert os.stat(path).st_mode & 0o077 == 0
    readline.clear_history()
    with messages.line_editing(path):
        kept = [readline.get_history_item(index + 1) for index in range(readline.get_current_history_length())]
    assert kept == [*entries[:3], "\n cut"]  # as the terminal shows a line separator
