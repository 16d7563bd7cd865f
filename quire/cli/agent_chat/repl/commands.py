"""The slash commands of the agent's terminal. Each takes the session and the words behind the command."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from quire.agent.session.export import FORMATS, export_session
from quire.agent.session.log import SessionLog
from quire.agent.session.store import find_session
from quire.agent.tools.seam import Risk
from quire.cli.agent_chat.sessions import session_lines
from quire.cli.output import one_line, print_note
from quire.cli.run import check_text
from quire.types import QuireError

if TYPE_CHECKING:
    from quire.cli.agent_chat.repl.session import ReplSession

EXIT = "exit"
_MORE_HELP = """\
@path attaches a file of the project folder. A block between \"\"\" and \"\"\" is one message.
Alt-Enter begins a new line, Tab completes commands and paths. Ctrl-C ends the turn, Ctrl-D leaves."""
_PROTECTION = {
    Risk.READ: "sandbox, reads",
    Risk.WRITE: "sandbox, writes files: asks",
    Risk.RUN: "sandbox, runs programs: asks",
    Risk.OUTSIDE: "outside the sandbox: asks",
}


class SlashCommand(NamedTuple):
    arguments: str
    help: str
    run: Callable[[ReplSession, str], None]


def find_command(name: str) -> SlashCommand:
    found = COMMANDS.get("exit" if name == "quit" else name)
    if found is None:
        raise QuireError("unknown_command", f"There is no command /{name}.", "/help lists them.")
    return found


def _help(repl: ReplSession, rest: str) -> None:
    width = max(len(f"/{name} {command.arguments}") for name, command in COMMANDS.items()) + 2
    lines = [f"{f'/{name} {command.arguments}':<{width}}{command.help}" for name, command in COMMANDS.items()]
    lines += ["", _MORE_HELP]
    repl.show("\n".join(lines))


def _reset(repl: ReplSession, rest: str) -> None:
    repl.agent.reset()
    print_note("the conversation was forgotten; files and approvals stay as they are.")


def _tools(repl: ReplSession, rest: str) -> None:
    tools = repl.agent.toolbox.all
    if not tools:
        repl.show("There are no tools in this session.")
        return
    width = max(len(tool.name) for tool in tools) + 2
    lines = [
        f"{tool.name:<{width}}{one_line(tool.description)[:70]} ({_PROTECTION[tool.risk].removesuffix(': asks')})"
        for tool in tools
    ]
    repl.show("\n".join(lines))


def _model(repl: ReplSession, rest: str) -> None:
    engine = repl.agent.engine
    if rest:
        repl.agent.switch_model(rest)
        print_note(f"the model is {engine.name}.")
        return
    others = [name for name in engine.models() if name != engine.name]
    repl.show("\n".join([f"{engine.name} (in use)", *others]))


def _system(repl: ReplSession, rest: str) -> None:
    if not rest:
        repl.show(repl.agent.session.state.system or "There is no system message.")
        return
    repl.agent.set_system("" if rest == "none" else check_text(rest, "the system message"))
    print_note("system message removed." if rest == "none" else "system message set.")


def _stats(repl: ReplSession, rest: str) -> None:
    state = repl.agent.session.state
    lines = [
        f"session    {state.id}, {state.num_turns} turns, {len(state.messages)} messages",
        f"prompts    {state.prompt_tokens} tokens, {state.cached_tokens} of them from the cache",
        f"answers    {state.output_tokens} tokens",
        f"status     {repl.status.text()}",
    ]
    repl.show("\n".join(lines))


def _context(repl: ReplSession, rest: str) -> None:
    agent, state = repl.agent, repl.agent.session.state
    limit = agent.engine.context_len
    lines = [f"tokens     {agent.context_used()} of {limit or 'an unknown limit'}"]
    lines.append(
        f"messages   {len(state.messages) - state.summarized} shown to the model, {state.summarized} summarized"
    )
    if state.summary:
        lines.append(f"summary    {one_line(state.summary)[:400]}")
    repl.show("\n".join(lines))


def _compact(repl: ReplSession, rest: str) -> None:
    if not repl.agent.compact(kept_turns=1):
        print_note("there is nothing to compact yet.")


def _undo(repl: ReplSession, rest: str) -> None:
    text = repl.agent.undo()
    if text is None:
        raise QuireError("nothing_to_undo", "There is no message to take back.")
    print_note(f"taken back: {one_line(text)[:100]} (files that tools changed stay changed).")


def _retry(repl: ReplSession, rest: str) -> None:
    text = repl.agent.undo()
    if text is None:
        raise QuireError("nothing_to_undo", "There is no message to send again.")
    repl.answer(text)


def _save(repl: ReplSession, rest: str) -> None:
    if not rest:
        print_note(f"the session is saved as it goes: {repl.agent.session.path}.")
        return
    path = _new_file(rest)
    repl.agent.session.sync()
    try:
        shutil.copyfile(repl.agent.session.path, path)
    except OSError as error:
        raise QuireError("write_failed", f"{path} can't be written: {error.strerror}.") from error
    print_note(f"a copy of the session is in {path}; /load {rest} goes on from it.")


def _load(repl: ReplSession, rest: str) -> None:
    if not rest:
        raise QuireError("usage", "/load needs a session's id or file.", "/sessions lists them.")
    path = Path(rest).expanduser()
    session = SessionLog.resume(path if path.is_file() else find_session(rest))
    repl.agent.open_session(session)
    for text in session.notes:
        print_note(text)
    repl.greet_resumed()


def _sessions(repl: ReplSession, rest: str) -> None:
    repl.show("\n".join(session_lines()) or "There are no saved sessions.")


def _export(repl: ReplSession, rest: str) -> None:
    words = rest.split(maxsplit=1)
    form = words[0] if words and words[0] in FORMATS else "json" if rest.endswith(".json") else "md"
    named = words[1] if len(words) == 2 and words[0] in FORMATS else rest if rest not in FORMATS else ""
    path = _new_file(named or f"{repl.agent.session.state.id}.{form}")
    try:
        path.write_text(export_session(repl.agent.session.state, form), "utf-8", errors="replace")
    except OSError as error:
        raise QuireError("write_failed", f"{path} can't be written: {error.strerror}.") from error
    print_note(f"the session was written to {path}.")


def _new_file(text: str) -> Path:
    path = Path(text).expanduser()
    if path.exists():
        raise QuireError("file_exists", f"{path} exists.", "Choose another name.")
    return path


def _permissions(repl: ReplSession, rest: str) -> None:
    agent, permissions = repl.agent, repl.agent.permissions
    if rest == "forget":
        permissions.forget()
        print_note("what was approved for this session is forgotten.")
        return
    lines = [agent.sandbox.describe() if agent.sandbox is not None else "There is no sandbox; no tool needs one."]
    lines += [f"{tool.name}: {_PROTECTION[tool.risk]}" for tool in agent.toolbox.all if tool.risk is not Risk.READ]
    lines += [f"allowed by --allow: {rule}" for rule in permissions.allow]
    lines += ["--yes: all that runs inside the sandbox is approved"] if permissions.yes else []
    lines += [f"approved for this session: {one_line(key)}" for key in sorted(permissions.remembered)]
    repl.show("\n".join([*lines, "/permissions forget takes back what was approved."]))


def _mcp(repl: ReplSession, rest: str) -> None:
    connections = repl.mcp.connections if repl.mcp is not None else {}
    lines = []
    for name, one in connections.items():
        place = one.spec.url or " ".join([one.spec.command, *one.spec.args])
        state = f"{len(one.offered)} tools" if one.is_up else f"not there: {one.problem or 'it ended'}"
        lines.append(f"{name}: {one_line(place)[:100]} ({state})")
        lines += [f"  {offered.name}  {one_line(offered.description or '')[:80]}" for offered in one.offered]
    repl.show("\n".join(lines) or "There are no MCP servers in this session; --mcp-config FILE names some.")


def _reasoning(repl: ReplSession, rest: str) -> None:
    if rest not in ("show", "hide", ""):
        raise QuireError("usage", f"/reasoning takes show or hide, not {rest!r:.50}.")
    repl.screen.shows_reasoning = rest != "hide" if rest else not repl.screen.shows_reasoning
    print_note(f"reasoning is {'shown' if repl.screen.shows_reasoning else 'hidden'}.")


def _exit(repl: ReplSession, rest: str) -> None:
    repl.is_over = True


COMMANDS: dict[str, SlashCommand] = {
    "help": SlashCommand("", "this list", _help),
    "reset": SlashCommand("", "forget the conversation", _reset),
    "tools": SlashCommand("", "list the tools, and what each may do", _tools),
    "model": SlashCommand("[NAME]", "show the model, or ask another one of the server", _model),
    "system": SlashCommand("[TEXT]", "show or set the system message; none removes it", _system),
    "stats": SlashCommand("", "turns and tokens so far", _stats),
    "context": SlashCommand("", "what the context holds", _context),
    "compact": SlashCommand("", "replace all turns but the last by a summary", _compact),
    "undo": SlashCommand("", "take the last message back", _undo),
    "retry": SlashCommand("", "send the last message again", _retry),
    "save": SlashCommand("[FILE]", "where the session is, or a copy of it", _save),
    "load": SlashCommand("ID|FILE", "go on with another session", _load),
    "sessions": SlashCommand("", "list saved sessions", _sessions),
    "export": SlashCommand("[md|json] [FILE]", "write the conversation as Markdown or JSON", _export),
    "permissions": SlashCommand("[forget]", "the sandbox, and what is approved", _permissions),
    "mcp": SlashCommand("", "MCP servers and their tools", _mcp),
    "reasoning": SlashCommand("[show|hide]", "show or hide the model's reasoning", _reasoning),
    EXIT: SlashCommand("", "leave (so does Ctrl-D)", _exit),
}
