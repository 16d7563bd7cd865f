"""The user's settings of the agent: MCP servers and hooks, and what is wrong with them in one line each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.agent.loop.prompt import MAX_AGENTS, attach_files, read_agents_file
from quire.agent.mcp.config import read_mcp_file
from quire.agent.settings import read_settings, settings_path
from quire.types import QuireError


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("SOME_KEY", "sk-1")


def written(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_servers_are_read_in_the_shape_of_other_agents(tmp_path: Path) -> None:
    entries = {
        "files": {"command": "npx", "args": ["-y", "server", "${HOME_OF:-/srv}"], "env": {"KEY": "${SOME_KEY}"}},
        "web": {"type": "http", "url": "https://example.org/mcp", "headers": {"Authorization": "Bearer ${SOME_KEY}"}},
        "old": {"url": "http://127.0.0.1:9/mcp"},
    }
    servers, notes = read_mcp_file(written(tmp_path / "mcp.json", {"mcpServers": entries}))
    files, web, old = servers
    assert not notes
    assert (files.command, files.args, files.env) == ("npx", ("-y", "server", "/srv"), {"KEY": "sk-1"})
    assert (web.url, web.headers) == ("https://example.org/mcp", {"Authorization": "Bearer sk-1"})
    assert old.url.endswith(":9/mcp")


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("text", "no object"),
        ({"command": ""}, "needs command"),
        ({"command": 3}, "needs command"),
        ({"command": "x", "args": "y"}, "args must be a list"),
        ({"command": "x", "args": [1]}, "args must be a list"),
        ({"command": "x", "env": {"A": 1}}, "env must be"),
        ({"command": "x", "cwd": 1}, "cwd must be"),
        ({"command": "${NOT_SET_ANYWHERE}"}, "NOT_SET_ANYWHERE is not set"),
        ({"url": "ftp://x"}, "no URL"),
        ({}, "needs url"),
        ({"type": "sse", "url": "http://x"}, "neither stdio nor http"),
    ],
)
def test_an_entry_with_an_error_is_one_line_and_the_others_are_used(tmp_path: Path, entry: Any, why: str) -> None:
    path = written(tmp_path / "mcp.json", {"mcpServers": {"bad": entry, "good": {"command": "x"}}})
    servers, notes = read_mcp_file(path)
    assert [spec.name for spec in servers] == ["good"]
    assert len(notes) == 1 and why in notes[0] and "'bad'" in notes[0] and "\n" not in notes[0]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"mcpServers": []}', "[" * 100_000, "\x00\xff"])
def test_a_file_that_is_none_is_one_line(tmp_path: Path, text: str) -> None:
    servers, notes = read_mcp_file(written(tmp_path / "mcp.json", text))
    assert not servers and len(notes) == 1 and "mcp.json" in notes[0]


def test_a_missing_file_and_a_bad_name_are_lines(tmp_path: Path) -> None:
    assert "can't be read" in read_mcp_file(tmp_path / "none.json")[1][0]
    path = written(tmp_path / "mcp.json", {"mcpServers": {"a b": {"command": "x"}}})
    assert "its name" in read_mcp_file(path)[1][0]


def test_the_users_file_has_servers_and_hooks_and_a_named_file_wins(tmp_path: Path) -> None:
    hook = {"event": "before", "tools": "shell", "command": ["check"]}
    servers = {"one": {"command": "mine"}, "two": {"command": "mine"}}
    written(settings_path(), {"mcpServers": servers, "hooks": [hook]})
    other = written(tmp_path / "mcp.json", {"mcpServers": {"two": {"command": "theirs"}}})
    settings = read_settings((other,))
    assert {spec.name: spec.command for spec in settings.servers} == {"one": "mine", "two": "theirs"}
    assert [(hook.event, hook.run) for hook in settings.hooks] == [("before", ("check",))] and not settings.notes


def test_hooks_alone_are_fine_and_a_broken_hook_is_an_error() -> None:
    written(settings_path(), {"hooks": []})
    assert not read_settings().notes
    written(settings_path(), {"hooks": [{"event": "before"}]})
    with pytest.raises(QuireError, match=r"agent\.json: hooks\[0\]"):
        read_settings()
    written(settings_path(), "{")
    assert "not JSON" in read_settings().notes[0]


def test_a_projects_servers_are_not_started_by_themselves(tmp_path: Path) -> None:
    path = written(tmp_path / ".mcp.json", {"mcpServers": {"evil": {"command": "x"}}})
    settings = read_settings(project=tmp_path)
    assert not settings.servers and "was not read" in settings.notes[0]
    assert [spec.name for spec in read_settings((path,), project=tmp_path).servers] == ["evil"]


def test_agents_md_is_bounded_and_no_link_leads_out_of_the_project(tmp_path: Path) -> None:
    project, outside = tmp_path / "project", written(tmp_path / "key", "SECRET")
    agents = written(project / "AGENTS.md", "Be kind. " * 10_000)
    text, notes = read_agents_file(project)
    assert len(text) == MAX_AGENTS and str(MAX_AGENTS) in notes[0]
    agents.unlink()
    agents.symlink_to(outside)
    text, notes = read_agents_file(project)
    assert text == "" and "was not read" in notes[0]


@pytest.mark.parametrize("word", ["../key", "link", "/etc/passwd"])
def test_a_file_outside_of_the_project_is_not_attached(tmp_path: Path, word: str) -> None:
    project, outside = tmp_path / "project", written(tmp_path / "key", "SECRET")
    project.mkdir()
    (project / "link").symlink_to(outside)
    with pytest.raises(QuireError, match="outside of the project"):
        attach_files(f"see @{word}", project)
