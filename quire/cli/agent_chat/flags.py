"""The agent's flags of `quire chat`, and the options that they make."""

from __future__ import annotations

import os
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from pathlib import Path

from quire.agent.assemble import AgentOptions
from quire.agent.loop.agent import AgentLimits
from quire.agent.sandbox.choose import WAYS
from quire.agent.session.store import find_session, last_session
from quire.types import QuireError

_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")


def add_agent_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("agent", "docs/agent.md describes tools, the sandbox and sessions.")
    group.add_argument("-p", "--prompt", metavar="TEXT", help="answer this once and leave; stdin is added as context")
    group.add_argument("--json", action="store_true", help="with -p: print one JSON object when done")
    group.add_argument("--stream-json", action="store_true", help="with -p: print events as lines of JSON")
    group.add_argument("--plain", action="store_true", help="a plain conversation without tools")
    group.add_argument("--hide-reasoning", action="store_true", help="do not show the model's reasoning")
    group.add_argument("--url", metavar="URL", help="use a server with OpenAI's API instead of loading a model")
    group.add_argument("--api-key", metavar="KEY", help="key for --url (default: OPENAI_API_KEY)")
    group.add_argument("--folder", type=Path, metavar="DIR", help="project folder (default: the current one)")
    group.add_argument("--tools", metavar="LIST", help="tools by name, or all or none (default: all but web_fetch)")
    group.add_argument(
        "--tools-in-prompt",
        action="store_true",
        help="describe the tools in the system message, for a server (--url) whose template does not show them",
    )
    group.add_argument("--allow", action="append", metavar="RULE", help="allow calls such as edit_file or shell(git *)")
    group.add_argument("--yes", action="store_true", help="approve all that runs inside the sandbox")
    group.add_argument("--max-turns", type=int, metavar="N", help="most requests to the model per message (default 50)")
    group.add_argument(
        "--strict-tools",
        action=BooleanOptionalAction,
        default=True,
        help="let a grammar keep tool calls well-formed (default: on)",
    )
    group.add_argument(
        "--mcp-config", action="append", type=Path, metavar="FILE", help='MCP servers: {"mcpServers": {...}}'
    )
    group.add_argument("--continue", dest="go_on", action="store_true", help="go on with the folder's last session")
    group.add_argument("--resume", metavar="ID", help="go on with a session")
    group.add_argument("--list-sessions", action="store_true", help="list saved sessions and leave")
    group.add_argument("--sandbox", choices=WAYS, help="use this kind of sandbox (default: the strongest that works)")
    group.add_argument(
        "--readable", action="append", type=Path, metavar="DIR", help="show a folder to tools, read-only"
    )


def agent_options(args: Namespace) -> AgentOptions:
    if args.go_on and args.resume:
        raise QuireError("usage", "--continue and --resume name two sessions.", "Leave one of them out.")
    if args.max_turns is not None and args.max_turns < 1:
        raise QuireError("usage", f"--max-turns {args.max_turns} must be at least 1.")
    folder = (args.folder or Path.cwd()).expanduser()
    if not folder.is_dir():
        raise QuireError("usage", f"--folder {folder} is no folder.")
    resume = find_session(args.resume) if args.resume else last_session(str(folder.resolve())) if args.go_on else None
    chosen = "all" if args.tools is None and args.tools_in_prompt else args.tools
    names = None if chosen is None else [name.strip() for name in chosen.split(",") if name.strip()]
    limits = AgentLimits() if args.max_turns is None else AgentLimits(max_requests=args.max_turns)
    return AgentOptions(
        folder=folder,
        tools=names,
        allow=args.allow or (),
        yes=args.yes,
        system=args.system,
        strict=args.strict_tools,
        sampling={name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None},
        limits=limits,
        resume=resume,
        sandbox_ways=WAYS if args.sandbox is None else (args.sandbox,),
        readable=args.readable or (),
    )


def api_key(args: Namespace) -> str | None:
    return args.api_key or os.environ.get("OPENAI_API_KEY") or None


def wants_agent(args: Namespace) -> bool:
    """Whether a flag was given that only the agent has."""
    return bool(
        args.url or args.go_on or args.resume or args.tools or args.allow or args.yes or args.readable or args.sandbox
    )
