"""Keeps the connections to MCP servers, in an event loop on a thread of its own.

A server that dies is started again by the next call of one of its tools. Calls come from the tools' threads.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, TextIO, cast

from quire.agent.mcp.config import McpServerSpec
from quire.agent.sandbox.output import clean_text
from quire.types import QuireError

START_SECONDS = 30.0
CALL_SECONDS = 600.0
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.05
MAX_PAGES = 20  # of a list of tools


@dataclass(slots=True)
class McpConnection:
    """One server: its client while it lives, and what it offers."""

    spec: McpServerSpec
    client: Any = None
    offered: list[Any] = field(default_factory=list)  # mcp.Tool
    problem: str = ""  # why there is no client
    task: asyncio.Task[None] | None = None
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    errors: TextIO | None = None  # what the server wrote to stderr

    @property
    def is_up(self) -> bool:
        return self.client is not None


class McpHost:
    """All servers of a session."""

    def __init__(self, specs: Sequence[McpServerSpec], *, start_seconds: float = START_SECONDS) -> None:
        self._start_seconds = start_seconds
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True)
        self.connections = {spec.name: McpConnection(spec) for spec in specs}

    def start(self) -> None:
        """Starts all servers side by side. One that fails has a `problem`."""
        self._thread.start()
        if find_spec("mcp") is None:
            for one in self.connections.values():
                one.problem = 'the package mcp is not installed: pip install "quire[agent]"'
            return
        for name in ("mcp", "client", "httpx2"):  # the SDK's loggers; what matters is in `problem`
            logging.getLogger(name).addHandler(logging.NullHandler())
        self._wait(self._start_all(), None)

    def call(self, server: str, tool: str, arguments: dict[str, Any], cancelled: threading.Event) -> Any:
        """Returns the server's result. Raises `QuireError` if it can't be reached or the user interrupts."""
        return self._wait(self._call(self.connections[server], tool, arguments), cancelled)

    def close(self) -> None:
        if self._thread.is_alive():
            with suppress(QuireError):
                self._wait(self._stop_all(), None)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_STOP_SECONDS)
        if not self._loop.is_running():
            self._loop.close()
        for one in self.connections.values():
            if one.errors is not None:
                one.errors.close()

    def _wait(self, work: Any, cancelled: threading.Event | None) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            try:
                return future.result(_POLL_SECONDS)
            except TimeoutError:
                if future.done():
                    raise QuireError("mcp_failed", "The MCP server took too long.") from None
                if cancelled is not None and cancelled.is_set():
                    future.cancel()
                    raise QuireError("interrupted", "The user interrupted this call.") from None

    # -- in the event loop

    async def _start_all(self) -> None:
        await asyncio.gather(*(self._ensure(one) for one in self.connections.values()))

    async def _stop_all(self) -> None:
        tasks = [one.task for one in self.connections.values() if one.task is not None]
        for one in self.connections.values():
            one.closing.set()
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_SECONDS)

    async def _ensure(self, one: McpConnection) -> None:
        """Connects if there is no connection. Afterwards there is a client or a problem."""
        if one.is_up:
            return
        one.problem, one.closing = "", asyncio.Event()
        ready = asyncio.Event()
        one.task = asyncio.create_task(self._hold(one, ready))
        try:
            await asyncio.wait_for(ready.wait(), self._start_seconds)
        except TimeoutError:
            one.problem = f"it did not answer within {self._start_seconds:g} s"
            one.task.cancel()

    async def _hold(self, one: McpConnection, ready: asyncio.Event) -> None:
        """Holds one connection open until `closing`. The SDK wants it entered and left in one task."""
        import mcp

        try:
            async with mcp.Client(self._transport(one), read_timeout_seconds=CALL_SECONDS, cache=None) as client:
                one.offered = await _list_tools(client)
                one.client = client
                ready.set()
                await one.closing.wait()
        except (Exception, asyncio.CancelledError) as error:
            one.problem = one.problem or self._reason(one, error)
        finally:
            one.client = None
            ready.set()

    def _transport(self, one: McpConnection) -> Any:
        spec = one.spec
        if spec.url:
            from mcp.client.streamable_http import streamable_http_client

            if not spec.headers:
                return spec.url
            from mcp.shared._httpx_utils import create_mcp_http_client

            return streamable_http_client(spec.url, http_client=create_mcp_http_client(headers=dict(spec.headers)))
        from mcp.client.stdio import StdioServerParameters, stdio_client

        if one.errors is None:
            made = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
            one.errors = cast(TextIO, made)
        given = StdioServerParameters(
            command=spec.command, args=list(spec.args), env=dict(spec.env), cwd=spec.folder or None
        )
        return stdio_client(given, errlog=one.errors)

    def _reason(self, one: McpConnection, error: BaseException) -> str:
        """Returns why a connection failed: the innermost error, and the last line that the server wrote."""
        words = _words(error)
        if one.errors is None:
            return words
        one.errors.seek(0, 2)
        one.errors.seek(max(0, one.errors.tell() - 2000))
        said = [line for line in clean_text(one.errors.read()).splitlines() if line.strip()]
        return f"{words}; it wrote: {said[-1].strip()[:200]}" if said else words

    async def _call(self, one: McpConnection, tool: str, arguments: dict[str, Any]) -> Any:
        await self._ensure(one)
        client = one.client
        if client is None:
            raise QuireError("mcp_failed", f"The MCP server {one.spec.name} is not there: {one.problem}.")
        calling = asyncio.create_task(client.call_tool(tool, arguments))
        watched: set[asyncio.Task[Any]] = {calling}
        if one.task is not None:
            watched.add(one.task)
        try:
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise QuireError("mcp_failed", f"The MCP server {one.spec.name} ended during the call.")
            return calling.result()
        except QuireError:
            raise
        except asyncio.CancelledError:
            raise
        except Exception as error:
            what = f"The MCP server {one.spec.name} failed: {_words(error)}."
            if _is_lost(error):
                await self._drop(one)
            raise QuireError("mcp_failed", what) from error
        finally:
            if not calling.done():
                calling.cancel()
                await asyncio.wait({calling}, timeout=2.0)  # the SDK tells the server

    async def _drop(self, one: McpConnection) -> None:
        """Gives a connection up, so that the next call makes a new one."""
        one.client = None
        one.closing.set()
        if one.task is not None:
            await asyncio.wait({one.task}, timeout=_STOP_SECONDS)


async def _list_tools(client: Any) -> list[Any]:
    found: list[Any] = []
    cursor = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return found


def _words(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return clean_text(" ".join(str(error).split()))[:200] or type(error).__name__


def _is_lost(error: BaseException) -> bool:
    """Whether the connection is gone, rather than the one call refused."""
    from mcp.shared.exceptions import MCPError
    from mcp_types import CONNECTION_CLOSED

    return not isinstance(error, MCPError) or error.error.code == CONNECTION_CLOSED


@contextmanager
def open_mcp(specs: Sequence[McpServerSpec]) -> Iterator[McpHost]:
    """Yields a host whose servers have been started; they are ended with it."""
    host = McpHost(specs)
    try:
        if specs:
            host.start()
        yield host
    finally:
        host.close()
