"""Builds the `Config` tree: defaults < TOML file < environment < flags, each value parsed strictly and checked once.

The command line calls `add_config_flags` and `config_from_args`; `LLM` calls `library_config`. An unknown setting or a
value out of bounds is an error that names the setting, its origin and the nearest correct name or value.
"""

from __future__ import annotations

import os
import re
from argparse import SUPPRESS, Action, ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Iterable, Mapping
from dataclasses import replace
from decimal import Decimal
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

from quire.config import Config, Knob, knobs, tables
from quire.types import QuireError

# Environment variables with the prefix QUIRE_ that are not settings.
OTHER_VARIABLES = {
    "QUIRE_CONFIG": "the TOML file to read",
    "QUIRE_DEBUG": "1 shows tracebacks of unexpected errors",
}
MASK = "********"
# Groups that commands without a server have flags for.
ENGINE_TABLES = ("model", "adapters", "cache", "scheduler", "engine")


class Setting(NamedTuple):
    """A value with its origin."""

    name: str
    value: Any
    source: str


# ---------------------------------------------------------------------------------------------------------------------
# Building


def build_config(*, file: Path | None, env: Mapping[str, str], flags: Mapping[str, Any], search: bool = True) -> Config:
    """Returns the effective settings. Without `file`, the default places are searched unless `search` is False."""
    path = find_config_file(file, env) if file is not None or search else None
    settings = _token_from_hub_variable(env)
    if path is not None:
        settings += _from_file(path)
    settings += _from_environment(env)
    settings += [_parse(_known(name, "on the command line"), value, _flag(name)) for name, value in flags.items()]
    return _apply(Config(), settings)


def override_config(config: Config, values: Mapping[str, Any]) -> Config:
    """Returns the same settings with some replaced, as in `LLM(..., dtype="float32")`."""
    return _apply(config, [_parse(_known(name, "among the arguments"), v, "argument") for name, v in values.items()])


def library_config(model: str | None, config: Config | None, knobs: Mapping[str, Any]) -> Config:
    """Returns the settings of a Python program: a config, or defaults and environment, then its own arguments."""
    base = config if config is not None else build_config(file=None, env=os.environ, flags={}, search=False)
    return override_config(base, {**knobs, **({} if model is None else {"model": model})})


def engine_settings(config: Config) -> dict[str, Any]:
    """Returns the settings from which another process builds the same engine: those not at their defaults, without the
    server's.
    """
    values = {name: item.read(config) for name, item in knobs().items() if item.table != "server"}
    return {name: value for name, value in values.items() if value != knobs()[name].default}


def find_config_file(file: Path | None, env: Mapping[str, str]) -> Path | None:
    """Returns the file named by flag or variable, which must exist; else ./quire.toml or the user's, if one exists."""
    for named, source in ((file, "--config"), (env.get("QUIRE_CONFIG"), "QUIRE_CONFIG")):
        if named:
            path = Path(named).expanduser()
            if not path.is_file():
                raise QuireError(
                    "config_not_found",
                    f"There is no configuration file {path} (from {source}).",
                    "Check the path, or leave it out.",
                    param="config",
                )
            return path
    candidates = [Path("quire.toml")]
    if home := env.get("XDG_CONFIG_HOME") or (env.get("HOME") and env["HOME"] + "/.config"):
        candidates.append(Path(home) / "quire" / "config.toml")
    return next((path for path in candidates if path.is_file()), None)


def describe_config(config: Config) -> list[Setting]:
    """Returns every setting with its value and origin for display; secrets are masked."""
    shown = []
    for name, item in knobs().items():
        value = item.read(config)
        source = config.sources.get(name, "default" if value == item.default else "code")
        shown.append(Setting(name, MASK if item.secret and value is not None else value, source))
    return shown


def _apply(config: Config, settings: Iterable[Setting]) -> Config:
    values: dict[str, dict[str, Any]] = {table: {} for table in tables()}
    sources = dict(config.sources)
    for setting in settings:
        values[knobs()[setting.name].table][setting.name] = setting.value
        sources[setting.name] = setting.source
    groups = {table: replace(getattr(config, table), **changed) for table, changed in values.items() if changed}
    return replace(config, sources=sources, **groups)


# ---------------------------------------------------------------------------------------------------------------------
# Sources of settings


def _from_file(path: Path) -> list[Setting]:
    import tomllib  # imported only if there is a file

    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise QuireError("config_not_readable", f"Can't read {path}: {error.strerror}.", param="config") from None
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, a number of thousands of digits, deep nesting
        raise QuireError("invalid_config", f"{path} is not valid TOML: {error}.", param="config") from None
    settings = []
    for table, entries in content.items():
        if table not in tables() or not isinstance(entries, dict):
            raise _misplaced(table, entries, path)
        for name, value in entries.items():
            item = _known(name, f"in [{table}] of {path}")
            if item.table != table:
                raise QuireError(
                    "unknown_setting",
                    f"Setting {name!r} is in [{table}] of {path}.",
                    f"It belongs in [{item.table}].",
                    param=name,
                )
            settings.append(_parse(item, value, str(path), typed=True))
    return settings


def _misplaced(name: str, value: Any, path: Path) -> QuireError:
    """Returns the error for a top-level entry of a file that is not a known table."""
    if name in tables():
        hint = f"[{name}] is a table: write its settings below a line [{name}]."
    elif name in knobs():
        hint = f"It belongs in [{knobs()[name].table}]."
    else:
        hint = _did_you_mean(name, {table: f"[{table}]" for table in tables()} | {k: k for k in knobs()})
    shown = f"table [{name}]" if isinstance(value, dict) else f"setting {name!r}"
    return QuireError("unknown_setting", f"Unknown {shown} at the top of {path}.", hint, param=name)


def _from_environment(env: Mapping[str, str]) -> list[Setting]:
    by_variable = {item.variable: item for item in knobs().values()}
    settings = []
    for variable in sorted(env):
        if not variable.startswith("QUIRE_") or variable in OTHER_VARIABLES:
            continue
        if variable not in by_variable:
            known = {name.removeprefix("QUIRE_"): name for name in (*by_variable, *OTHER_VARIABLES)}
            hint = _did_you_mean(variable.removeprefix("QUIRE_"), known)
            raise QuireError("unknown_setting", f"Unknown setting {variable} in the environment.", hint, param=variable)
        if env[variable]:  # an empty variable counts as unset
            settings.append(_parse(by_variable[variable], env[variable], variable))
    return settings


def _token_from_hub_variable(env: Mapping[str, str]) -> list[Setting]:
    """Returns the token from HF_TOKEN, which every source of Quire's own overrides, including the file."""
    return [Setting("hub_token", env["HF_TOKEN"], "HF_TOKEN")] if env.get("HF_TOKEN") else []


def _known(name: str, place: str) -> Knob:
    if name in knobs():
        return knobs()[name]
    hint = _did_you_mean(name, {k: f"{k!r} in [{item.table}]" for k, item in knobs().items()})
    raise QuireError("unknown_setting", f"Unknown setting {name!r} {place}.", hint, param=name)


def _did_you_mean(name: str, known: Mapping[str, str]) -> str:
    from difflib import get_close_matches  # only for errors

    near = get_close_matches(name, known, n=1, cutoff=0.6)
    return f"Did you mean {known[near[0]]}?" if near else "`quire run --help` lists every setting."


# ---------------------------------------------------------------------------------------------------------------------
# Values

_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"(\d[\d_]{0,30}(?:\.\d{1,30})?)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE | re.ASCII)
_WHOLE = re.compile(r"[+-]?\d(_?\d){0,30}", re.ASCII)
_LARGEST = 1 << 62  # default upper bound: more would overflow the size of a tensor


def _parse(item: Knob, raw: Any, source: str, *, typed: bool = False) -> Setting:
    """Parses one value to its type and checks its bounds. `typed`: the source distinguishes 5 from "5"."""
    if item.optional and (raw is None or (isinstance(raw, str) and raw.strip().lower() == item.none_word)):
        return Setting(item.name, None, source)
    if isinstance(raw, os.PathLike):
        raw = os.fspath(raw)
    text = isinstance(raw, str) and (not typed or item.unit == "bytes")
    value = _from_text(item, raw.strip()) if text and item.kind is not str else _from_number(item, raw)
    if type(value) is not item.kind or (isinstance(value, str) and (not value.strip() or "\0" in value)):
        raise _refuse(item, raw, source, f"must be {_expected(item)}")
    if item.choices is not None and not _is_choice(item.choices, str(value)):
        raise _refuse(item, raw, source, f"must be one of {', '.join(item.choices)}")
    if isinstance(value, (int, float)):
        _check_bounds(item, raw, value, source)
    return Setting(item.name, value, source)


def _is_choice(choices: Iterable[str], value: str) -> bool:
    """Whether a value is one of the choices; "name:N" is one with any number up to 999 for N."""
    head, colon, number = value.rpartition(":")
    is_numbered = bool(colon) and number.isascii() and number.isdigit() and len(number) <= 3
    return (value in choices and not value.endswith(":N")) or (is_numbered and f"{head}:N" in choices)


def _check_bounds(item: Knob, raw: Any, value: float, source: str) -> None:
    low = -_LARGEST if item.low is None else item.low
    high = _LARGEST if item.high is None else item.high
    if low <= value <= high:
        return
    if item.high is None:
        why = f"must be at least {low:g}" if value < low else f"is too large (at most {high})"
    else:
        why = f"must lie between {low:g} and {high:.10g}"
    raise _refuse(item, raw, source, why)


def _from_text(item: Knob, text: str) -> Any:
    """Parses a text to the setting's type; None if it is not valid."""
    if item.kind is bool:
        return _WORDS.get(text.lower())
    if item.unit == "bytes":
        return parse_size(text)
    if item.kind is int:
        return int(text) if _WHOLE.fullmatch(text) else None
    try:
        return _from_number(item, float(text))
    except ValueError:
        return None


def _from_number(item: Knob, raw: Any) -> Any:
    """Converts an int to a float where a float is required, and other libraries' integers to int; rejects NaN."""
    if isinstance(raw, (bool, str)):
        return raw
    if item.kind is int and hasattr(raw, "__index__"):
        return index(raw)
    if item.kind is float and isinstance(raw, (int, float)):
        return float(raw) if abs(raw) <= _LARGEST else None
    return raw


def parse_size(text: str) -> int | None:
    """Returns the bytes of "4096", "512M" (powers of 1000) or "1.5GiB" (powers of 1024); None for any other text."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        return None
    base = 1024 if match[3] else 1000
    return int(Decimal(match[1].replace("_", "")) * base ** _POWERS[match[2].lower()])


def _expected(item: Knob) -> str:
    if item.unit == "bytes":
        kind = "a number of bytes, such as 512M or 2GiB"
    else:
        kind = {bool: "true or false", int: "a whole number", float: "a number", str: "a non-empty text"}[item.kind]
    return f"{kind}, or {item.none_word}" if item.optional else kind


def _refuse(item: Knob, raw: Any, source: str, why: str) -> QuireError:
    shown = MASK if item.secret else repr(raw) if isinstance(raw, str) else str(raw).lower()
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return QuireError("invalid_setting", f"{item.name}={shown} (from {source}) {why}.", param=item.name)


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def add_config_flags(parser: ArgumentParser, groups: Iterable[str] | None = None) -> None:
    """Adds a flag for every setting of these groups (all by default), --config and --show-config."""
    general = parser.add_argument_group("configuration")
    general.add_argument(
        "--config",
        dest="config_file",
        type=Path,
        metavar="FILE",
        help="settings in TOML (default: ./quire.toml, then ~/.config/quire/config.toml)",
    )
    general.add_argument("--show-config", action="store_true", help="print the effective settings and exit")
    for table in tables() if groups is None else groups:
        section = parser.add_argument_group(f"{table} settings")
        for item in knobs().values():
            if item.table == table:
                _add_flag(section, item)


def config_from_args(args: Namespace, env: Mapping[str, str] | None = None) -> Config:
    """Returns the effective settings of a command whose parser has the flags of `add_config_flags`."""
    flags = {name: value for name, value in vars(args).items() if name in knobs()}
    return build_config(file=args.config_file, env=os.environ if env is None else env, flags=flags)


def _flag(name: str) -> str:
    return knobs()[name].flag


def _add_flag(section: Any, item: Knob) -> None:
    """Adds the flag of one setting. Its value stays text, since `_parse` handles the values of all sources."""
    help_text = (item.help + _default_note(item)).replace("%", "%%")
    if item.kind is bool:
        section.add_argument(item.flag, action=BooleanOptionalAction, default=SUPPRESS, help=help_text)
        return
    action = _JoinList if item.unit == "list" else "store"
    metavar = "{" + ",".join(item.choices) + "}" if item.choices else _METAVARS[item.unit or item.kind]
    section.add_argument(item.flag, action=action, default=SUPPRESS, metavar=metavar, help=help_text)


class _JoinList(Action):
    """Joins the values of a repeated flag by commas."""

    def __call__(self, parser: Any, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, values if before is None else f"{before},{values}")


_METAVARS: dict[Any, str] = {"bytes": "SIZE", "path": "FILE", "list": "TEXT", int: "N", float: "X", str: "TEXT"}


def _default_note(item: Knob) -> str:
    if item.default is None:
        return "" if item.kind is str else " (default: auto)"
    default = {True: "on", False: "off"}.get(item.default) if item.kind is bool else item.default
    return f" (default: {default})"
