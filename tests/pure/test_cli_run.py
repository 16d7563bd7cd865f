"""`quire run` against a model that speaks prepared answers."""

from __future__ import annotations

import io
import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire.cli import run as command
from quire.cli.output import format_memory, printable
from quire.types import QuireError, Timing, Usage
from tests.pure.fake_llm import FakeLLM, Output


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def parse(*argv: str) -> Namespace:
    parser = ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["run", *argv])


def answer(llm: FakeLLM, *argv: str) -> int:
    return command.run_command(parse(*argv), lambda config: llm)  # type: ignore[arg-type, return-value]


def refuse(*argv: str) -> QuireError:
    """The error of a command that must fail before any model is opened."""
    with pytest.raises(QuireError) as caught:
        command.run_command(parse(*argv), lambda config: pytest.fail("opened a model"))
    return caught.value


def feed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8"))


def test_text_goes_to_stdout_and_nothing_to_a_piped_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM([["The sky", " is", " blue."]])
    assert answer(llm, "Why?") == 0
    assert capsys.readouterr() == ("The sky is blue.\n", "")
    assert llm.asked == [[{"role": "user", "content": "Why?"}]]
    assert llm.is_closed


def test_each_piece_is_flushed_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    stream = SimpleNamespace(write=events.append, flush=lambda: events.append("<flush>"), isatty=lambda: False)
    monkeypatch.setattr(sys, "stdout", stream)
    answer(FakeLLM([["a", "b\n"]]), "x")
    assert [event for event in events if event] == ["a", "<flush>", "b\n", "<flush>", "<flush>"]


def test_json_is_exactly_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(FakeLLM([["one two", " drei ü"]]), "x", "--json") == 0
    out = capsys.readouterr().out
    assert out.endswith("}\n") and out.count("\n") == 1
    assert json.loads(out) == {
        "text": "one two drei ü",
        "token_ids": [3, 3, 4, 1],
        "finish_reason": "stop",
        "usage": {
            "prompt_tokens": 1,
            "cached_tokens": 0,
            "completion_tokens": 4,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
        "timing": {"queue": 0.0, "first_token": 0.25, "total": 1.25},
    }


def test_system_and_sampling_flags(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM([["ok"]])
    sampling = "--max-tokens=5 --temperature=0.5 --top-p=0.9 --top-k=7 --min-p=0.1 --seed=-3 --stop=END --stop=X"
    answer(llm, "hi", "--system", "Be brief.", *sampling.split())
    assert llm.asked == [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]]
    params = llm.params[0]
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (5, 0.5, 0.9, 7)
    assert (params.min_p, params.seed, params.stop) == (0.1, -3, ("END", "X"))


def test_without_flags_everything_is_the_models_own(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM([["ok"]])
    answer(llm, "hi")
    assert (llm.params[0].temperature, llm.params[0].top_p, llm.params[0].max_tokens) == (None, None, None)


def test_raw_passes_text_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM([["ok"]])
    answer(llm, " Once\n", "--raw")
    assert llm.asked == [" Once\n"]


@pytest.mark.parametrize(
    ("argv", "stdin", "prompt"),
    [
        (["--stdin"], b"from a pipe\n", "from a pipe"),
        (["Sum up:", "--stdin"], b"long text\n", "Sum up:\n\nlong text"),
        (["only", "--stdin"], b"", "only"),
        (["--stdin"], b"\xef\xbb\xbfmark", "mark"),
        (["-"], b"not read", "-"),
        (["--", "--looks-like-a-flag"], b"", "--looks-like-a-flag"),
    ],
)
def test_where_the_prompt_comes_from(
    argv: list[str], stdin: bytes, prompt: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feed(monkeypatch, stdin)
    llm = FakeLLM([["ok"]])
    answer(llm, *argv)
    assert llm.asked == [[{"role": "user", "content": prompt}]]


def test_raw_stdin_keeps_its_last_line_feed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feed(monkeypatch, b"Q: 1+1?\nA:\n")
    llm = FakeLLM([["ok"]])
    answer(llm, "--stdin", "--raw")
    assert llm.asked == ["Q: 1+1?\nA:\n"]


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        ([], "empty_prompt"),
        ([""], "empty_prompt"),
        (["  \n"], "empty_prompt"),
        (["", "--raw"], "empty_prompt"),
        (["--stdin"], "empty_prompt"),
        (["half \udc80 character"], "invalid_prompt"),
        (["x", "--raw", "--system", "y"], "usage"),
        (["x", "--temperature", "nan"], "invalid_parameter"),
        (["x", "--max-tokens", "0"], "invalid_parameter"),
        (["x", "--max-tokens", "-1"], "invalid_parameter"),
        (["x", "--stop", ""], "invalid_parameter"),
        (["x", "--depth", "0"], "invalid_setting"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_opened(
    argv: list[str], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, b"")
    assert refuse(*argv).code == code


def test_stdin_must_be_text(monkeypatch: pytest.MonkeyPatch) -> None:
    feed(monkeypatch, b"abc\xff")
    error = refuse("--stdin")
    assert error.code == "invalid_prompt" and "position 3" in error.what


def test_stdin_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MAX_PROMPT_BYTES", 4)
    feed(monkeypatch, b"12345")
    assert refuse("--stdin").code == "invalid_prompt"


def test_an_answer_that_ends_in_error_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    failed = Output("ha", [], "error", Usage(), Timing(), error="Its logits were not finite.", error_code="bad_logits")
    with pytest.raises(QuireError, match="not finite") as caught:
        answer(FakeLLM([["ha", failed]]), "x", "--json")
    assert caught.value.code == "bad_logits"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("error", [KeyboardInterrupt(), QuireError("failed", "It failed.")])
def test_an_answer_that_breaks_off_ends_its_line_and_closes_the_model(
    error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = FakeLLM([["half an", error]])
    with pytest.raises(type(error)):
        answer(llm, "x")
    assert capsys.readouterr().out == "half an\n"
    assert llm.is_closed and llm.num_ended_early == 1


def test_a_reader_that_leaves_cancels_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(text: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=fail, flush=lambda: None, isatty=lambda: False))
    llm = FakeLLM([["a", "b", "c"]])
    with pytest.raises(BrokenPipeError):
        answer(llm, "x")
    assert llm.is_closed and llm.num_ended_early == 1


def test_the_config_reaches_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    def open_llm(config: object) -> FakeLLM:
        seen.append(config)
        return FakeLLM([["ok"]])

    command.run_command(parse("x", "--model", "other", "--max-model-len", "64"), open_llm)  # type: ignore[arg-type]
    assert (seen[0].model.model, seen[0].model.max_model_len) == ("other", 64)  # type: ignore[attr-defined]


def test_a_missing_model_is_said_before_torch_is_imported(tmp_path: Path) -> None:
    with pytest.raises(QuireError) as caught:
        command.run(parse("x", "--model", str(tmp_path / "nothing")))
    assert caught.value.code == "model_not_found"


def test_summary() -> None:
    output = Output("x", [], "length", Usage(9, 4, 11), Timing(0.0, 0.25, 2.25))
    line = command.summary(output)  # type: ignore[arg-type]
    assert line == "11 tokens · 5.0 tok/s · first token 250 ms · prompt 9 (4 cached) · cut at the token limit"


def test_a_terminal_is_not_steered() -> None:
    assert printable("a\x1b[31mb\r\x07\tc\n\x9bd é") == "a[31mb\tc\nd é"


@pytest.mark.parametrize(
    ("size", "shown"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (200 << 20, "200 MiB"), (3 << 29, "1.5 GiB")]
)
def test_format_bytes(size: int, shown: str) -> None:
    assert format_memory(size) == shown


# -- the model, named without a flag


def test_two_words_are_the_model_and_the_prompt() -> None:
    args = parse("smollm2", "Why?")
    seen: list[str] = []
    llm = FakeLLM([["ok"]])
    command.run_command(args, lambda config: seen.append(config.model.model) or llm)  # type: ignore[func-returns-value, arg-type, return-value]
    assert seen == ["smollm2"]
    assert llm.asked == [[{"role": "user", "content": "Why?"}]]


def test_two_words_that_name_no_model_were_a_prompt_without_quotes() -> None:
    error = refuse("why", "not")
    assert "'why' is not a model" in error.what and 'quire run "why not"' in error.hint


def test_a_model_without_a_prompt_is_refused_with_advice() -> None:
    error = refuse("smollm2")
    assert error.what == "smollm2 is a model, and there is no prompt."
    assert 'quire run smollm2 "…"' in error.hint and "quire chat smollm2" in error.hint


def test_a_model_named_twice_is_refused() -> None:
    assert refuse("smollm2", "Why?", "--model", "other").what == "The model is named twice."


def test_one_word_of_a_hub_ids_form_is_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM([["ok"]])
    assert answer(llm, "and/or") == 0
    assert llm.asked == [[{"role": "user", "content": "and/or"}]]
