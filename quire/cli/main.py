"""The `quire` command: imports the chosen subcommand's module only, runs it, and prints an error as one line.

Each command is a module of this package with `add_parser(subparsers)` and `run(args) -> int`. Exit codes: 0 done, 1
failed, 2 wrong usage or input (except for `USAGE_EXIT`), 70 a bug in Quire, 130 interrupted, 141 stdout has no reader.
"""

from __future__ import annotations

import os
import sys
from argparse import Action, ArgumentParser, BooleanOptionalAction, HelpFormatter, Namespace, _SubParsersAction
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

from quire.cli.output import print_error, show_warnings_plainly
from quire.types import QuireError

COMMANDS = {
    "serve": "answer OpenAI's and Anthropic's clients over HTTP",
    "run": "answer one prompt",
    "chat": "hold a conversation",
    "batch": "answer a file of requests",
    "pull": "fetch a model",
    "cache": "look after a folder that keeps KV cache",
    "quantize": "write a model in fewer bits",
    "node": "start ranks for an engine on another machine",
    "bench": "measure speed",
    "chaos": "inject faults into a server and check that no token is lost",
    "doctor": "show what this machine has and what is missing",
}
# Error codes with these prefixes blame the input, and exit with `usage_exit`; all others exit with 1.
USAGE_CODES = (
    "usage",
    "invalid_",
    "unknown_",
    "empty_",
    "config_not_",
    "prompt_too_long",
    "model_not_found",
    "not_a_model",
)

# Exit codes for wrong usage that differ from 2. `bench` reserves 2 for a missed gate.
USAGE_EXIT = {"bench": 1}


def main(argv: Sequence[str] | None = None) -> int:
    _open_missing_streams()
    show_warnings_plainly()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except SystemExit as leaving:  # argparse, after --help or a usage error
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except KeyboardInterrupt:
        if argv is None:
            _end_on_next_interrupt()
        return 130
    except BrokenPipeError:
        return 141
    except QuireError as error:
        print_error(error.what, error.hint)
        return usage_exit(words) if error.code.startswith(USAGE_CODES) else 1
    except Exception as error:
        return _unexpected(error)
    finally:
        _flush_or_drop_stdout()


def usage_exit(words: Sequence[str]) -> int:
    """Return the exit code for wrong usage of the command in `words[0]` (the command line without `quire`)."""
    return USAGE_EXIT.get(words[0], 2) if words else 2


def _dispatch(argv: list[str]) -> int:
    name = argv[0] if argv else ""
    if name and not name.startswith("-") and name not in COMMANDS:
        _root_parser().error(f"unknown command {name!r}{_nearest(name, COMMANDS)}")
    module = _load(name) if name in COMMANDS else None
    parser = _root_parser()
    choices = _add_commands(parser, name, module)
    if not argv:
        parser.print_help()
        return 2
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        chosen = choices.get(name, parser)
        flags = [word for word in unknown if word.startswith("-")]
        chosen.error(f"unrecognized arguments: {' '.join(flags or unknown)}{_advice(flags, chosen)}")
    if module is None:
        parser.error("a command is missing")
    code = _show_config(args) if getattr(args, "show_config", False) else int(module.run(args))
    sys.stdout.flush()  # raises BrokenPipeError here, where `main` handles it
    return code


# ---------------------------------------------------------------------------------------------------------------------
# Parsers


class Help(HelpFormatter):
    """Lists subcommands without an extra heading, and shows a boolean flag as `--[no-]name`."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=28)

    def _format_action(self, action: Action) -> str:
        if isinstance(action, _SubParsersAction):
            return "".join(super(Help, self)._format_action(command) for command in action._get_subactions())
        return super()._format_action(action)

    def _format_action_invocation(self, action: Action) -> str:
        if isinstance(action, BooleanOptionalAction):
            return f"--[no-]{action.option_strings[0].removeprefix('--')}"
        return super()._format_action_invocation(action)


class Parser(ArgumentParser):
    """An argparse parser without abbreviated flags, since a new flag would make an abbreviation ambiguous."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": Help, **kwargs})

    def error(self, message: str) -> NoReturn:
        self.exit(usage_exit(self.prog.split()[1:]), f"{self.format_usage()}{self.prog}: error: {message}\n")


def _root_parser() -> Parser:
    from quire import __version__

    parser = Parser(
        prog="quire",
        usage="quire COMMAND [options]",
        description="Serve language models, from a laptop to a fast GPU.",
        epilog="`quire COMMAND --help` lists a command's options.",
    )
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    return parser


def _add_commands(parser: Parser, name: str, module: ModuleType | None) -> dict[str, Any]:
    """Add the chosen command with its flags, and the others with their summaries. Returns the parsers by name."""
    subparsers = parser.add_subparsers(title="commands", prog="quire", dest="command")
    for command, summary in COMMANDS.items():
        if command == name and module is not None:
            module.add_parser(subparsers)
        elif find_spec(f"quire.cli.{command}") is not None:
            subparsers.add_parser(command, help=summary)
    return dict(subparsers.choices)


def _load(name: str) -> ModuleType | None:
    if find_spec(f"quire.cli.{name}") is None:
        raise QuireError(
            "unknown_command", f"This build of quire has no command {name!r}.", "`quire --help` lists them."
        )
    return import_module(f"quire.cli.{name}")


def _advice(flags: Sequence[str], parser: ArgumentParser) -> str:
    if not flags:
        return " (text with spaces needs quotes)"
    return _nearest(flags[0].split("=")[0], _option_strings(parser)) or " (put text that begins with - after --)"


def _option_strings(parser: ArgumentParser) -> list[str]:
    found: list[str] = []
    for action in parser._actions:
        found += action.option_strings
        for nested in action.choices.values() if isinstance(action.choices, dict) else ():
            found += _option_strings(nested)
    return found


def _nearest(word: str, known: Any) -> str:
    from difflib import get_close_matches  # only for errors

    near = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""


def _show_config(args: Namespace) -> int:
    from quire.cli.output import show_config
    from quire.config_build import config_from_args

    show_config(config_from_args(args))
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# Exit


def _unexpected(error: Exception) -> int:
    if os.environ.get("QUIRE_DEBUG", "0") not in ("", "0"):
        import traceback

        traceback.print_exc()
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        print_error(f"{error.strerror or error}{where}.")
        return 1
    print_error(f"unexpected {type(error).__name__}: {error}.", "Set QUIRE_DEBUG=1 for the traceback.")
    return 70


def _open_missing_streams() -> None:
    """Replace missing standard streams by /dev/null: Python sets them to None if their descriptors are closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without Unicode shows ? instead of raising


def _flush_or_drop_stdout() -> None:
    """Flush stdout; if that fails, redirect it to /dev/null so that Python's exit does not fail again."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _end_on_next_interrupt() -> None:
    """Make another Ctrl-C during Python's shutdown end the process at once, without a traceback."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)
