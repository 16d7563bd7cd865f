"""Every import contract of pyproject.toml can fail: a forbidden import in a copy of `quire` breaks it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"

FLOORS = "every room has a floor, and imports go down"
FORBIDDEN = [  # contract, importing module, imported module
    (FLOORS, "quire.chaos.gate", "quire.cli.main"),
    (FLOORS, "quire.bench.stats", "quire.chaos.report"),
    (FLOORS, "quire.edge", "quire.runtime.store"),
    (FLOORS, "quire.types.plans", "quire.config"),
    (FLOORS, "quire.parallel.communicator", "quire.layers.linear"),
    (FLOORS, "quire.kernels.table", "quire.parallel.communicator"),
    (
        "startup: what builds an engine is above what it is built from",
        "quire.startup.defaults",
        "quire.startup.assemble",
    ),
    ("no cycles between the modules of these rooms", "quire.cache.lease", "quire.cache.index"),
    ("the server: reaches the engine through its client alone", "quire.server.state", "quire.engine.scheduler"),
    (
        "models and layers know nothing of cache, engine and runtime, and kernels know no layers' modules",
        "quire.sampling.rows",
        "quire.cache.memory",
    ),
    ("the client: knows the engine's wire and states, not its computation", "quire.client.link", "quire.kernels.table"),
    ("the cache index: knows types and config alone", "quire.cache.tree", "quire.text.stream"),
    (
        "the runtime: knows of the engine only the protocol that it implements",
        "quire.runtime.rows",
        "quire.engine.chunking",
    ),
    ("the agent: reaches an engine through the public API alone", "quire.agent.engines.local", "quire.engine.loop"),
    ("the sandbox's processes: the standard library alone", "quire.agent.sandbox.child.files", "quire.types"),
    ("rooms without torch", "quire.cache.tree", "torch"),
    ("rooms without torch", "quire.agent.engines.local", "torch"),
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package and of the contracts."""
    folder = tmp_path_factory.mktemp("imports")
    shutil.copytree(ROOT / "quire", folder / "quire", ignore=shutil.ignore_patterns("__pycache__", "src", "static"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def lint(tree: Path) -> tuple[int, str]:
    """The exit code and the report of `lint-imports` in this folder, with all white space as single blanks."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, "-c", LINT, "--no-cache"]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize(("contract", "importer", "imported"), FORBIDDEN)
def test_a_contract_breaks(tree: Path, contract: str, importer: str, imported: str) -> None:
    path = tree / (importer.replace(".", "/") + ".py")
    source = path.read_text(encoding="utf-8")
    path.write_text(f"{source}\nimport {imported}\n", encoding="utf-8")
    try:
        code, report = lint(tree)
    finally:
        path.write_text(source, encoding="utf-8")
    assert code == 1 and f"{contract} BROKEN" in report, report


def test_a_room_without_a_floor_breaks_the_contract(tree: Path) -> None:
    room = tree / "quire" / "attic.py"
    room.touch()
    try:
        code, report = lint(tree)
    finally:
        room.unlink()
    assert code == 1 and f"{FLOORS} BROKEN" in report and "attic" in report, report


def test_every_contract_is_kept_and_has_a_test(tree: Path) -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    assert {contract["name"] for contract in contracts} == {contract for contract, _, _ in FORBIDDEN}
    code, report = lint(tree)
    assert code == 0 and f"{len(contracts)} kept, 0 broken" in report, report
