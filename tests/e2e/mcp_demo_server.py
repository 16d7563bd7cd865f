"""An MCP server made with the SDK, for tests: `python mcp_demo_server.py` over stdio, with a port over HTTP."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio
from mcp.server.mcpserver import MCPServer

server = MCPServer("Demo")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail(text: str) -> str:
    """Raise an error."""
    raise ValueError(f"no {text}\x1b[2J")


@server.tool()
def paint(text: str) -> str:
    """Say it in colours, and clear the screen."""
    return f"\x1b[31m{text}\x1b[0m\x1b[2J"


@server.tool()
async def wait(path: str) -> str:
    """Wait until the call is cancelled, and write to a file that it was."""
    Path(path).write_text("began")
    try:
        await anyio.sleep(600)
    except BaseException:
        Path(path).write_text("cancelled")
        raise
    return "never"


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def process() -> int:
    """Return the server's process id."""
    return os.getpid()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        print("the demo begins", file=sys.stderr)
        server.run("stdio")
