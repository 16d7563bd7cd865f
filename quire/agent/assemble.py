"""Puts an agent together for a project folder: sandbox, tools, permissions, and a session that is new or resumed.

Command lines and programs use it alike. The agent is a context manager's value: leaving it ends the tools' processes
and removes their temporary files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.agent.engines.seam import ChatEngine
from quire.agent.hooks import ToolHook, ToolHooks
from quire.agent.loop.agent import Agent, AgentLimits
from quire.agent.loop.events import THREAD_STARTED, Event
from quire.agent.loop.prompt import write_system_message
from quire.agent.permissions import AskUser, Permissions
from quire.agent.sandbox.choose import WAYS, Sandbox, choose_sandbox, make_scratch
from quire.agent.session.log import SessionLog
from quire.agent.session.store import sessions_folder
from quire.agent.tools.seam import Risk, Tool
from quire.agent.tools.toolbox import Toolbox, choose_tools
from quire.types import QuireError


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """What a user chooses for a session."""

    folder: Path = field(default_factory=Path.cwd)
    tools: Sequence[str] | None = None  # names; None: the default ones if the model takes tools
    own_tools: Sequence[Tool] = ()  # from Python and from MCP servers
    allow: Sequence[str] = ()  # rules such as shell(git status*)
    yes: bool = False  # all that runs inside the sandbox is approved
    hooks: Sequence[ToolHook] = ()
    system: str | None = None
    strict: bool = True
    sampling: dict[str, Any] = field(default_factory=dict)
    limits: AgentLimits = field(default_factory=AgentLimits)
    resume: Path | None = None  # the file of an earlier session
    sessions: Path | None = None  # where new sessions are kept; None: the user's state folder
    sandbox_ways: Sequence[str] = WAYS
    readable: Sequence[Path] = ()  # shown read-only beside the project


@contextmanager
def open_agent(
    engine: ChatEngine,
    options: AgentOptions | None = None,
    *,
    emit: Callable[[Event], None] = lambda event: None,
    ask: AskUser | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Iterator[Agent]:
    """Yields an agent. `ask` decides about calls, `note` gets lines that the user should see before the first turn."""
    options = options or AgentOptions()
    with ExitStack() as stack:
        toolbox = Toolbox([*_chosen(engine, options, note), *options.own_tools])
        stack.callback(toolbox.close)
        sandbox = _sandbox(options, toolbox, stack, note)
        session = _session(engine, options, toolbox, note)
        stack.callback(engine.close)
        agent = Agent(
            engine,
            session,
            toolbox=toolbox,
            permissions=Permissions(options.allow, options.yes, ask),
            sandbox=sandbox,
            hooks=ToolHooks(options.hooks),
            limits=options.limits,
            emit=emit,
            sampling=options.sampling,
            strict=options.strict,
        )
        stack.callback(agent.close_session)
        agent.items.event(THREAD_STARTED, thread_id=session.state.id)
        yield agent


def _chosen(engine: ChatEngine, options: AgentOptions, note: Callable[[str], None]) -> list[Tool]:
    if not engine.takes_tools and options.tools is None:
        note(
            f"the chat template of {engine.name} knows no tools, so they are off (--tools all describes them in words)."
        )
        return []
    return choose_tools(options.tools)


def _sandbox(options: AgentOptions, toolbox: Toolbox, stack: ExitStack, note: Callable[[str], None]) -> Sandbox | None:
    """Returns the sandbox, or None if no tool needs one. Says what protects, and what does not."""
    if all(tool.risk is Risk.OUTSIDE for tool in toolbox.all):
        return None
    scratch = stack.enter_context(make_scratch())
    try:
        sandbox = choose_sandbox(options.folder, Path(scratch), ways=options.sandbox_ways, readable=options.readable)
    except QuireError as error:
        if options.tools is not None or options.yes or options.allow:
            raise
        note(f"tools are off, since {error.what[:1].lower()}{error.what[1:]} {error.hint}")
        for tool in toolbox.all:
            if tool.risk is not Risk.OUTSIDE:
                toolbox.remove(tool.name)
        return None
    if options.yes and not sandbox.is_whole:
        what = f"--yes needs the whole sandbox, and here it does not protect all: {'; '.join(sandbox.gaps)}."
        raise QuireError("sandbox_incomplete", what, "Install bubblewrap or allow user namespaces, or leave --yes out.")
    if not sandbox.is_whole:
        note(sandbox.describe() + ".")
    return sandbox


def _session(engine: ChatEngine, options: AgentOptions, toolbox: Toolbox, note: Callable[[str], None]) -> SessionLog:
    if options.resume is not None:
        session = SessionLog.resume(options.resume)
        for text in session.notes:
            note(text)
        if session.state.model != engine.name:
            note(f"the session was with {session.state.model}; it goes on with {engine.name}.")
            session.add({"type": "model", "name": engine.name})
        return session
    has_tools = bool(toolbox.all)
    system, notes = write_system_message(options.folder.resolve(), has_tools=has_tools, own=options.system)
    for text in notes:
        note(text)
    return SessionLog.create(
        options.sessions or sessions_folder(),
        project=str(options.folder.resolve()),
        model=engine.name,
        system=system,
        tools=[tool.name for tool in toolbox.all],
    )
