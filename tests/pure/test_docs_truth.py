"""What README.md and some docstrings promise, compared with the code."""

from __future__ import annotations

import inspect
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.cli.main import COMMANDS, _option_strings
from quire.config import knobs
from quire.config_build import OTHER_VARIABLES
from quire.engine import policies
from quire.kernels.native.library import BYTE_FORMS, FORMS
from quire.machine import PACKAGES
from tests.pure.test_cli_hints import OPENS_MODELS, parsers

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SENTENCES = " ".join(README.split())  # without line ends
FOREIGN = {"--index-url"}  # of pip


def shell_lines() -> Iterator[str]:
    """The command lines of README's blocks, continued ones joined, without what a prompt shows."""
    for language, block in re.findall(r"```(sh|console)\n(.*?)```", README, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if language == "sh" or line.startswith("$ "):
                yield line.removeprefix("$ ")


def test_commands_in_blocks_parse() -> None:
    calls = [part for line in shell_lines() for part in re.split(r"&&|\|", line) if part.split()[:1] == ["quire"]]
    assert len(calls) >= 2
    found = parsers()
    for call in calls:
        name, *words = shlex.split(call)[1:]
        _, unknown = found[name].parse_known_args(words)
        assert not unknown, call


def test_the_table_has_every_command_and_benchmark() -> None:
    rows = "\n".join(line for line in README.splitlines() if line.startswith("| `quire "))
    first = [row.split("|")[1] for row in rows.splitlines()]
    named = {word for cell in first for word in re.findall(r"`quire (\w+)", cell)}
    assert named == set(COMMANDS)
    benches = " ".join(cell for cell in first if "quire bench" in cell)
    for name in (name.removeprefix("bench ") for name in parsers() if name.startswith("bench ")):
        assert re.search(rf"[` ]{name}`", benches), f"bench {name} is not in the table"


def test_every_flag_named_exists() -> None:
    known = {flag for parser in parsers().values() for flag in _option_strings(parser)} | FOREIGN
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", README))
    assert not named - known
    variables = {item.variable for item in knobs().values()} | set(OTHER_VARIABLES)
    assert set(re.findall(r"QUIRE_[A-Z_]+", README)) <= variables


def test_torch_is_pinned_alike_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pin = next(item for item in project["dependencies"] if item.startswith("torch"))
    assert f"pip install '{pin}' --index-url https://download.pytorch.org/whl/cpu" in README
    assert next(package.install for package in PACKAGES if package.name == "torch") == pin


def test_the_cpu_build_meets_the_pin() -> None:
    """Or `pip install .` would replace it by PyPI's."""
    specifiers = pytest.importorskip("packaging.specifiers")
    pin = next(package.install for package in PACKAGES if package.name == "torch")
    assert specifiers.SpecifierSet(pin.removeprefix("torch")).contains("2.13.0+cpu")


def test_the_types_that_stay_in_their_blocks_are_named() -> None:
    sentence = re.search(
        r"stay in their own blocks, [^.]*? where these are ([^.]*?), and in their own floats", SENTENCES
    )
    assert sentence is not None
    floats = re.search(r"own floats where they are (\w+), (\w+) or (\w+)", SENTENCES)
    assert floats is not None
    blocks = set(re.findall(r"\w*\d\w*", sentence[1])) - {"or"}
    assert blocks | set(floats.groups()) == set(FORMS) - set(BYTE_FORMS)  # docs/quantize.md has those


def test_the_trace_is_where_it_is_said_to_be() -> None:
    knob = knobs()["trace"]
    has = {name for name, parser in parsers().items() if any(a.help == knob.help for a in parser._actions)}
    assert has == set(OPENS_MODELS)
    assert "`--trace FILE` with `run`, `chat`, `serve` and the benchmarks that load a model" in SENTENCES
    assert "--trace" in _option_strings(parsers()["bench online"])


def test_the_policies_docstring_counts_right() -> None:
    words = {1: "one", 2: "two", 3: "three"}
    text = " ".join((policies.__doc__ or "").split())
    made = [item for _, item in inspect.getmembers(policies, inspect.isclass) if item.__module__ == policies.__name__]
    admissions = [item for item in made if hasattr(item, "admit") and not getattr(item, "_is_protocol", False)]
    victims = [item for item in made if hasattr(item, "choose") and not getattr(item, "_is_protocol", False)]
    assert f"`Order` has {words[len(policies.ORDERS)]} implementations" in text
    assert len(admissions) == len(victims) == 1 and "`Admission` and `Victims` have one each" in text


def test_the_map_has_every_room() -> None:
    """The architecture page has a row for each package and top module, and for nothing else."""
    page = (ROOT / "docs/architecture.md").read_text()
    table = page[page.index("## Rooms") : page.index("## Rules that hold everywhere")]
    cells = " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    named = set(re.findall(r"`([\w./]+)`", cells))
    rooms = {f"{path.name}/" for path in (ROOT / "quire").iterdir() if (path / "__init__.py").exists()}
    modules = {path.name for path in (ROOT / "quire").glob("*.py")} - {"__init__.py", "__main__.py"}
    assert named == rooms | modules, sorted(named ^ (rooms | modules))


def test_every_page_is_linked_from_the_map_or_readme() -> None:
    linked = README + (ROOT / "docs/architecture.md").read_text()
    assert not [page.name for page in (ROOT / "docs").glob("*.md") if f"{page.name})" not in linked]
