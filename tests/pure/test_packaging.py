"""The facts a package index and a type checker read: license, classifiers, `py.typed`, and one version everywhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from email.message import Message
from email.parser import HeaderParser
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import quire

ROOT = Path(__file__).parents[2]
COPIED = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md")


def has_setuptools(lowest: int) -> bool:
    """Without an import: setuptools refuses to be imported where distutils is there already, from another test."""
    try:
        return int(version("setuptools").partition(".")[0]) >= lowest
    except PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's metadata and Python files as setuptools builds them, without the native library."""
    if not has_setuptools(77):
        pytest.skip("needs setuptools 77")
    folder = tmp_path_factory.mktemp("source")
    for name in COPIED:
        shutil.copy(ROOT / name, folder / name)
    (folder / "quire").mkdir()
    for name in ("__init__.py", "py.typed"):
        shutil.copy(ROOT / "quire" / name, folder / "quire" / name)
    for command in (["dist_info"], ["build_py", "--build-lib", "lib"]):
        argv = [sys.executable, "setup.py", "-q", *command]
        subprocess.run(argv, cwd=folder, check=True, capture_output=True, timeout=60)
    return folder


def metadata(built: Path) -> Message:
    return HeaderParser().parsestr(next(built.glob("*.dist-info/METADATA")).read_text("utf-8"))


def test_the_license_is_declared_and_shipped(built: Path) -> None:
    assert metadata(built)["License-Expression"] == "Apache-2.0"
    shipped = next(built.glob("*.dist-info/**/LICENSE")).read_text()
    assert shipped == (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in shipped and "END OF TERMS AND CONDITIONS" in shipped


def test_type_checkers_find_the_annotations(built: Path) -> None:
    assert (built / "lib/quire/py.typed").is_file()
    assert "Typing :: Typed" in (metadata(built).get_all("Classifier") or [])


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == quire.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "\n## Unreleased\n" in changelog and f"\n## {quire.__version__}\n" in changelog


def test_every_source_of_the_native_library_is_shipped() -> None:
    """A package without one of them could not be compiled where it is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["quire.kernels.native"]
    folder = ROOT / "quire/kernels/native"
    sources = {path for path in (folder / "src").rglob("*") if path.is_file()}
    assert len(sources) > 30
    assert sources == {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
