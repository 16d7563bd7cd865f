"""`quire chat -p` for scripts: output, events, exit codes, stdin, AGENTS.md, MCP servers and hooks."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.agent.sandbox.run import sandbox_failed
from quire.cli.main import main
from tests.e2e.transcript_server import TranscriptServer, transcript_server

SERVER = Path(__file__).parent / "mcp_demo_server.py"
linux = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return folder


@contextmanager
def stdin_of(data: bytes) -> Iterator[None]:
    """A pipe as standard input, as a shell would give it."""
    read, write = os.pipe()
    os.write(write, data)
    os.close(write)
    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.FileIO(read), "utf-8")
    try:
        yield
    finally:
        sys.stdin.close()
        sys.stdin = before


@pytest.fixture
def run(project: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(server: TranscriptServer, prompt: str, *argv: str, stdin: bytes = b"") -> tuple[int, str, str]:
        with stdin_of(stdin):
            code = main(["chat", "-p", prompt, "--url", server.url, *argv])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


@linux
def test_a_task_is_done_and_only_the_answer_is_on_stdout(run: Run, project: Path) -> None:
    (project / "AGENTS.md").write_text("Always be kind.")
    answers = [
        {"content": "I write it.", "calls": [("write_file", {"path": "a.py", "content": "print(6 * 7)\n"})]},
        {"calls": [("shell", {"command": "python3 a.py"})]},
        "It prints **42**.",
    ]
    with transcript_server(answers) as server:
        code, out, _ = run(server, "Write a.py", "--yes", stdin=b"some context\n")
    assert (code, out) == (0, "It prints **42**.\n")
    assert (project / "a.py").read_text() == "print(6 * 7)\n"
    first, last = server.asked[0]["messages"], server.asked[2]["messages"]
    assert "Always be kind." in first[0]["content"]
    assert first[1]["content"] == "Write a.py\n\n<stdin>\nsome context\n</stdin>"
    assert last[-1]["role"] == "tool" and last[-1]["content"] == "42"
    assert {tool["function"]["name"] for tool in server.asked[0]["tools"]} == {
        "shell",
        "python",
        "read_file",
        "write_file",
        "edit_file",
        "list",
        "search",
    }


@linux
def test_events_are_lines_of_json_and_nothing_is_approved_by_itself(run: Run, project: Path) -> None:
    answers = [{"calls": [("shell", {"command": "echo x > made"})]}, "I could not."]
    with transcript_server(answers) as server:
        code, out, _ = run(server, "go", "--stream-json")
    events = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and not (project / "made").exists()
    assert [events[0]["type"], events[1]["type"], events[-1]["type"]] == [
        "thread.started",
        "turn.started",
        "turn.completed",
    ]
    done = next(event["item"] for event in events if event["type"] == "item.completed" and "tool" in event["item"])
    assert (
        done["type"] == "command_execution" and done["status"] == "failed" and "--yes was not given" in done["output"]
    )


def test_one_object_with_usage_and_items_and_going_on(run: Run) -> None:
    with transcript_server(["first", "second"]) as server:
        code, out, _ = run(server, "one", "--tools", "none", "--json")
        first = json.loads(out)
        assert code == 0 and (first["status"], first["text"], first["requests"]) == ("completed", "first", 1)
        assert first["usage"]["output_tokens"] == 20 and first["items"][0]["type"] == "agent_message"
        _, out, _ = run(server, "two", "--tools", "none", "--json", "--resume", first["thread_id"][:-2])
        assert json.loads(out)["thread_id"] == first["thread_id"]
        _, out, _ = run(server, "three", "--tools", "none", "--json", "--continue")
    contents = [one["content"] for one in server.asked[-1]["messages"] if one["role"] != "system"]
    assert contents == ["one", "first", "two", "second", "three"]


@linux
def test_exit_codes(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    call = {"calls": [("list", {"path": "."})]}
    with transcript_server([dict(call) for _ in range(5)]) as server:
        code, _, err = run(server, "go", "--max-turns", "2")
        assert code == 3 and "limit of 2 requests" in err
        bad = "<tool_call>{broken</tool_call>"
        server.answers[:] = [bad, bad, bad]
        code, out, _ = run(server, "go", "--json")
        assert code == 1 and json.loads(out)["error_code"] == "malformed_calls"
        for argv in (
            ("--json", "--stream-json"),
            ("--max-turns", "0"),
            ("--tools", "hammer"),
            ("--allow", "a b c"),
            ("--continue", "--resume", "x"),
            ("--folder", "/no/such"),
        ):
            code, out, err = run(server, "go", *argv)
            assert (code, out) == (2, "") and err.count("\n") == 1, argv
        assert run(server, "  ")[0] == 2
    assert main(["chat", "-p", "go", "--url", "http://127.0.0.1:9"]) == 1
    assert "Is it running?" in capsys.readouterr().err


@linux
def test_a_folder_that_is_no_project_turns_tools_off_with_a_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with transcript_server(["hello"]) as server:
        code, out, err = run(server, "hi", "--folder", "/usr")
        assert (code, out) == (0, "hello\n") and "tools are off" in err and err.count("\n") == 1
        assert "tools" not in server.asked[0]
        code, _, err = run(server, "hi", "--folder", "/usr", "--yes")
        assert code == 2 and "no project folder" in err


@linux
def test_yes_needs_the_whole_sandbox(run: Run, project: Path) -> None:
    with transcript_server(["hello"]) as server:
        code, out, err = run(server, "hi", "--sandbox", "landlock", "--yes")
        assert code != 0 and out == "" and "--yes needs the whole sandbox" in err and ".git" in err
        assert not server.asked


@linux
def test_a_kernel_without_a_sandbox_runs_no_tools_and_says_why(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_sandbox(*args: object, **options: object) -> None:
        raise sandbox_failed("landlock: the kernel has none")

    monkeypatch.setattr("quire.agent.sandbox.choose.run_command", no_sandbox)
    with transcript_server(["hello"]) as server:
        code, out, err = run(server, "hi")
        assert (code, out) == (0, "hello\n") and "tools are off" in err and "the kernel has none" in err
        assert "tools" not in server.asked[0]
        for argv in (("--tools", "shell"), ("--yes",), ("--allow", "shell")):
            code, out, err = run(server, "hi", *argv)
            assert code != 0 and out == "" and "the kernel has none" in err and err.count("\n") == 1, argv
        assert len(server.asked) == 1


def test_mcp_servers_and_hooks_of_the_user(run: Run, project: Path, tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason='the package mcp is not installed: pip install "quire[agent]"')
    log = tmp_path / "log"
    hook = {"event": "after", "tools": "mcp__*", "command": ["/bin/sh", "-c", f"cat > {log}; echo looked"]}
    config = tmp_path / "config" / "quire"
    config.mkdir(parents=True)
    (config / "agent.json").write_text(json.dumps({"hooks": [hook]}))
    servers: dict[str, Any] = {"demo": {"command": sys.executable, "args": [str(SERVER)]}, "bad": {"command": 1}}
    (project / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    answers = [{"calls": [("mcp__demo__add", {"a": 2, "b": 3})]}, "Five."]
    argv = ("--tools", "none", "--mcp-config", "mcp.json")
    with transcript_server([dict(answers[0]), "No.", *answers]) as server:  # type: ignore[arg-type]
        code, _, err = run(server, "go", *argv)
        assert "'bad' of mcp.json was left out" in err
        assert "not allowed" in server.asked[1]["messages"][-1]["content"]
        code, out, _ = run(server, "go", *argv, "--allow", "mcp__demo__*")
    assert (code, out) == (0, "Five.\n")
    assert server.asked[3]["messages"][-1]["content"] == "5\n[hook: looked]"
    assert json.loads(log.read_text())["arguments"] == {"a": 2, "b": 3}
