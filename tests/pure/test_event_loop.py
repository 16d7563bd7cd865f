"""The server's event loop: uvloop's where it is installed, asyncio's own elsewhere; and no server on Windows."""

from __future__ import annotations

import asyncio
import sys
from argparse import ArgumentParser

import pytest

from quire.cli import serve
from quire.server.event_loop import run_event_loop
from quire.types import QuireError


async def loop_module() -> str:
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


def test_uvloop_is_used_where_it_is_installed() -> None:
    pytest.importorskip("uvloop")
    assert run_event_loop(loop_module()) == "uvloop"


def test_asyncio_serves_without_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert run_event_loop(loop_module()) == "asyncio"


def test_windows_is_told_that_it_can_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["serve"])
    monkeypatch.setattr(serve.sys, "platform", "win32")
    with pytest.raises(QuireError, match="can't run on Windows") as caught:
        serve.run(arguments)
    assert "WSL" in caught.value.hint
