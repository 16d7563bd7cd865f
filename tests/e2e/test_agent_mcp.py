"""A server made with the MCP SDK, over stdio and over HTTP: listed, called, cancelled, and its death survived."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.agent.mcp.config import McpServerSpec
from quire.agent.mcp.host import McpHost, open_mcp
from quire.agent.mcp.tools import McpTool, mcp_tools
from quire.agent.tools.seam import Risk, ToolContext
from quire.types import QuireError

pytest.importorskip("mcp", reason='the package mcp is not installed: pip install "quire[agent]"')
SERVER = Path(__file__).parent / "mcp_demo_server.py"
SECONDS = 60.0  # only a hang takes so long


def until(path: Path, text: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not path.exists() or path.read_text() != text:
        assert time.monotonic() < deadline, f"{path} never holds {text!r}"
        time.sleep(0.02)


class HttpServer:
    """The demo server over HTTP, on a port that stays the same when it is started again."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.port = found.getsockname()[1]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, SERVER, str(self.port)], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert self.process.poll() is None and time.monotonic() < deadline, "the demo server does not start"
                time.sleep(0.05)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(params=["stdio", "http"])
def host(request: pytest.FixtureRequest) -> Iterator[McpHost]:
    if request.param == "stdio":
        with open_mcp([McpServerSpec("demo", sys.executable, (str(SERVER),))]) as opened:
            yield opened
        return
    server = HttpServer()
    try:
        spec = McpServerSpec("demo", url=f"http://127.0.0.1:{server.port}/mcp", headers={"X-Key": "1"})
        with open_mcp([spec]) as opened:
            opened.http = server  # type: ignore[attr-defined]
            yield opened
    finally:
        server.stop()


def tools_of(host: McpHost) -> dict[str, McpTool]:
    tools, notes = mcp_tools(host)
    assert not notes
    return {tool.name: tool for tool in tools}


def test_a_server_is_listed_and_called(host: McpHost) -> None:
    tools = tools_of(host)
    assert set(tools) == {f"mcp__demo__{name}" for name in ("add", "fail", "paint", "wait", "die", "process")}
    add = tools["mcp__demo__add"]
    assert add.risk is Risk.OUTSIDE and add.description == "Add two numbers."
    assert set(add.parameters["properties"]) == {"a", "b"}
    assert add.run({"a": 2, "b": 40}, ToolContext()).content == "42"
    assert add.run({"a": "no"}, ToolContext()).is_error
    assert tools["mcp__demo__paint"].run({"text": "red"}, ToolContext()).content == "red"
    failed = tools["mcp__demo__fail"].run({"text": "luck"}, ToolContext())
    assert failed.is_error and "\x1b" not in failed.content


def test_a_call_is_cancelled_in_the_server_too(host: McpHost, tmp_path: Path) -> None:
    tools, context, path = tools_of(host), ToolContext(), tmp_path / "state"

    def interrupt() -> None:
        until(path, "began")
        context.cancelled.set()

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(QuireError, match="interrupted"):
        tools["mcp__demo__wait"].run({"path": str(path)}, context)
    until(path, "cancelled")
    assert tools["mcp__demo__add"].run({"a": 1, "b": 1}, ToolContext()).content == "2"


def test_the_death_of_a_server_is_one_error_and_the_next_call_finds_a_new_one(host: McpHost) -> None:
    tools = tools_of(host)
    before = tools["mcp__demo__process"].run({}, ToolContext()).content
    with pytest.raises(QuireError, match="MCP server demo"):
        tools["mcp__demo__die"].run({}, ToolContext())
    if hasattr(host, "http"):
        with pytest.raises(QuireError, match="MCP server demo"):
            tools["mcp__demo__add"].run({"a": 1, "b": 1}, ToolContext())
        host.http.stop()
        host.http.start()
    after = tools["mcp__demo__process"].run({}, ToolContext()).content
    assert after.isdigit() and after != before


def test_servers_that_do_not_start_are_lines_and_the_others_work() -> None:
    code = "import sys; sys.exit('no key was given')"
    specs = [
        McpServerSpec("missing", "/no/such/program"),
        McpServerSpec("ends", sys.executable, ("-c", code)),
        McpServerSpec("closed", url="http://127.0.0.1:9/mcp"),
        McpServerSpec("demo", sys.executable, (str(SERVER),)),
    ]
    with open_mcp(specs) as host:
        tools, notes = mcp_tools(host)
    assert len(tools) == 6 and len(notes) == 3
    assert "missing is not there" in notes[0] and "no key was given" in notes[1] and "closed is not there" in notes[2]


def test_a_server_that_says_nothing_is_given_up() -> None:
    silent = McpServerSpec("silent", sys.executable, ("-c", "import sys; sys.stdin.read()"))
    host = McpHost([silent], start_seconds=0.5)
    try:
        host.start()
        assert "did not answer within 0.5 s" in mcp_tools(host)[1][0]
    finally:
        host.close()


def test_the_server_ends_with_the_session() -> None:
    with open_mcp([McpServerSpec("demo", sys.executable, (str(SERVER),))]) as host:
        tools = tools_of(host)
        process = int(tools["mcp__demo__process"].run({}, ToolContext()).content)
        assert Path(f"/proc/{process}").exists() or sys.platform != "linux"
    assert not Path(f"/proc/{process}").exists()
