"""Opens the agent of `quire chat`: the user's settings, MCP servers, sandbox, tools and session."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from quire.agent.assemble import AgentOptions, open_agent
from quire.agent.engines.seam import ChatEngine
from quire.agent.loop.agent import Agent
from quire.agent.loop.events import Event
from quire.agent.mcp.host import McpHost, open_mcp
from quire.agent.mcp.tools import mcp_tools
from quire.agent.permissions import AskUser
from quire.agent.settings import read_settings
from quire.cli.output import print_note


@dataclass(frozen=True, slots=True)
class OpenedChat:
    agent: Agent
    mcp: McpHost


@contextmanager
def open_chat(
    args: Namespace,
    engine: ChatEngine,
    options: AgentOptions,
    emit: Callable[[Event], None],
    ask: AskUser | None = None,
) -> Iterator[OpenedChat]:
    has_tools = options.tools is None or "none" not in options.tools or bool(args.mcp_config)
    settings = read_settings(tuple(args.mcp_config or ()), project=options.folder)
    for text in settings.notes:
        print_note(text)
    with ExitStack() as stack:
        host = stack.enter_context(open_mcp(settings.servers if has_tools else []))
        tools, notes = mcp_tools(host)
        for text in notes:
            print_note(text)
        options = replace(options, own_tools=(*options.own_tools, *tools), hooks=(*options.hooks, *settings.hooks))
        yield OpenedChat(stack.enter_context(open_agent(engine, options, emit=emit, ask=ask, note=print_note)), host)
