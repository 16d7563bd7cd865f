"""Which sandbox is chosen, and what is said where this machine's kernel lacks a protection."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from quire.agent.sandbox import choose
from quire.agent.sandbox.choose import choose_sandbox
from quire.agent.sandbox.plan import SandboxPlan
from quire.agent.sandbox.run import FinishedCommand, sandbox_failed
from quire.types import QuireError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what the kernel has: bubblewrap's trial, namespaces, and the version of Landlock."""

    def have(bubblewrap: bool, namespaces: bool, landlock: int) -> None:
        def run_command(plan: SandboxPlan, command: Sequence[str], program: str | None, **_: float) -> FinishedCommand:
            if program is not None and not bubblewrap:
                return FinishedCommand(1, "bwrap: setting up uid map: Permission denied", 0, 0.0)
            if program is None and plan.namespaces and not namespaces:
                raise sandbox_failed("unshare: Operation not permitted")
            if not landlock:
                raise sandbox_failed("landlock: the kernel has none")
            return FinishedCommand(0, "works\n", 6, 0.0)

        monkeypatch.setattr(choose, "find_bubblewrap", lambda: "/usr/bin/bwrap")
        monkeypatch.setattr(choose, "run_command", run_command)
        monkeypatch.setattr(choose, "landlock_abi", lambda: landlock)

    return have


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "project").mkdir()
    return tmp_path / "project", tmp_path


def test_the_strongest_way_that_works_is_taken(kernel: Callable[..., None], folders: tuple[Path, Path]) -> None:
    for has, way in (
        ((True, True, 6), "bubblewrap"),
        ((False, True, 6), "namespaces"),
        ((False, False, 6), "landlock"),
    ):
        kernel(*has)
        assert choose_sandbox(*folders).way == way


def test_a_kernel_that_lacks_all_is_one_error_with_its_words(
    kernel: Callable[..., None], folders: tuple[Path, Path]
) -> None:
    kernel(False, False, 0)
    with pytest.raises(QuireError) as caught:
        choose_sandbox(*folders)
    assert caught.value.code == "sandbox_failed" and "\n" not in str(caught.value)
    for why in ("uid map: Permission denied", "unshare: Operation not permitted", "landlock: the kernel has none"):
        assert why in caught.value.what
    with pytest.raises(QuireError, match="landlock: the kernel has none"):  # nor does a named way run without it
        choose_sandbox(*folders, ways=("landlock",))


@pytest.mark.parametrize(("version", "emptied", "ended"), [(2, True, True), (3, False, True), (6, False, False)])
def test_gaps_of_an_older_landlock_are_said(
    version: int, emptied: bool, ended: bool, kernel: Callable[..., None], folders: tuple[Path, Path]
) -> None:
    kernel(False, False, version)
    line = choose_sandbox(*folders).describe()
    assert "NOT protected: .git" in line and "modes and times" in line
    assert (("can be emptied" in line), ("can be ended" in line)) == (emptied, ended)


def test_landlock_is_not_passed_over_where_the_kernel_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.agent.sandbox.child import landlock

    monkeypatch.setattr(landlock, "landlock_abi", lambda: 0)
    with pytest.raises(OSError, match="landlock: the kernel has none"):
        landlock.restrict([], [], [], network=True, scopes=True)
