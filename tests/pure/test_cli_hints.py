"""What our messages advise can be done: every flag in one belongs to each command that can show it."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import quire
from quire.cli.main import COMMANDS, Parser, _option_strings

PACKAGE = Path(quire.__file__).parent
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")
COMMAND = re.compile(r"\bquire (?P<name>[a-z]+)(?P<rest>[^`;,.:]*)")
FOREIGN = re.compile(r"\bpip install [^`,]*")  # flags of another program
OPENS_MODELS = (
    "run",
    "chat",
    "serve",
    "doctor",
    "bench offline",
    "bench batch",
    "bench latency",
    "bench start",
    "bench gap",
    "bench growth",
    "bench compare-llama-cpp",
    "bench quality",
    "bench speculation",
    "bench tiers",
    "bench adapters",
)
BENCH = {  # file or folder of `quire/bench` -> its benchmark; the others serve all that open a model
    "bench/agent": "agent",
    "bench/online/compare.py": "compare",
    "bench/hostile": "hostile",
    "bench/kernels": "kernels",
    "bench/llama_cpp.py": "compare-llama-cpp",
    "bench/online": "online",
    "bench/speculation": "speculation",
}


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Every command and benchmark by its name."""
    root = Parser(prog="quire").add_subparsers()
    for name in COMMANDS:
        import_module(f"quire.cli.{name}").add_parser(root)
    found = dict(root.choices)
    for action in found["bench"]._actions:
        if isinstance(action.choices, dict):
            found |= {f"bench {name}": parser for name, parser in action.choices.items()}
    return found


def can_show(path: Path) -> list[str]:
    """The commands that run the code of a file and would show its messages."""
    room, name = path.parts[0], path.stem
    if path == Path("startup/rank_engine.py"):
        return ["serve", "bench offline"]  # a command without --tp has one rank
    if path.is_relative_to("cli/agent_chat"):
        return ["chat"]
    if path.is_relative_to("cli/bench_commands"):
        return ["bench" if name == "flags" else f"bench {name}"]
    if room == "cli":
        own = {"serve_engine": "serve"}.get(name, name)
        shared = ["main", "output"]
        if own == "model_argument":
            return ["run", "chat", "serve", "doctor"]
        own = "chat" if own == "messages" else own
        return [*OPENS_MODELS, "pull"] if own in shared else [own]
    if room in ("server", "client"):
        return ["serve"]
    if room == "bench":
        own = next((name for place, name in BENCH.items() if path.is_relative_to(place)), None)
        return list(OPENS_MODELS) if own is None else [f"bench {own}"]
    if room == "quantize":
        return ["quantize"]
    if room in ("agent", "chaos"):
        return ["chat" if room == "agent" else "chaos"]
    return [*OPENS_MODELS, "pull"] if room in ("files", "config.py", "config_build.py") else list(OPENS_MODELS)


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """The texts of a file, f-strings as one, that are neither docstrings nor flags being declared or built."""
    tree = ast.parse((PACKAGE / path).read_text())
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inner |= {id(value) for value in node.values}
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            inner.add(id(body[0].value))  # a docstring
    for node in ast.walk(tree):
        text = None
        if isinstance(node, ast.JoinedStr):
            parts = [value.value if isinstance(value, ast.Constant) else "…" for value in node.values]
            text = "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            text = node.value
        if text is not None and " " in text and "{ color" not in text:
            yield node.lineno, text


FILES = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]
ADVISING = [path for path in FILES if any(FLAG.search(text) or COMMAND.search(text) for _, text in messages(path))]


@pytest.fixture(scope="module")
def flags() -> dict[str, set[str]]:
    return {name: set(_option_strings(parser)) for name, parser in parsers().items()}


@pytest.mark.parametrize("path", ADVISING, ids=str)
def test_advice_names_flags_its_commands_have(path: Path, flags: dict[str, set[str]]) -> None:
    wrong = []
    for line, text in messages(path):
        rest = FOREIGN.sub("", text)
        for named in COMMAND.finditer(rest):
            full = f"{named['name']} {named['rest'].split()[0]}" if named["rest"].split() else named["name"]
            command = full if full in flags else named["name"]
            if command in flags:
                wrong += [f"{line}: {command} {flag}" for flag in FLAG.findall(named[0]) if flag not in flags[command]]
        for flag in FLAG.findall(COMMAND.sub("", rest)):
            wrong += [f"{line}: {command} {flag}" for command in can_show(path) if flag not in flags[command]]
    assert not wrong, f"quire/{path} advises flags that commands do not have: {wrong}"


@pytest.mark.parametrize("path", ADVISING, ids=str)
def test_advice_in_backticks_names_commands_there_are(path: Path) -> None:
    quoted = [name for _, text in messages(path) for name in re.findall(r"`quire ([a-z]+)", text)]
    assert set(quoted) <= set(COMMANDS)


def test_the_walk_sees_advice() -> None:
    """Or the tests above would pass for want of messages."""
    texts = [text for path in ADVISING for _, text in messages(path) if FLAG.search(text)]
    assert len(texts) > 30
    assert any("--chat-template" in text for text in texts)
