"""Finds the strongest sandbox that this machine has, and says in words what protects and what does not.

The ways, from the strongest: bubblewrap, the native launcher with namespaces, the native launcher with Landlock and
seccomp alone. Each is tried with a real command; the first that works is taken.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quire.agent.sandbox.bubblewrap import find_bubblewrap
from quire.agent.sandbox.child.landlock import landlock_abi
from quire.agent.sandbox.plan import ALL_NAMESPACES, SandboxLimits, SandboxPlan, make_plan
from quire.agent.sandbox.run import run_command, sandbox_failed
from quire.types import QuireError

WAYS = ("bubblewrap", "namespaces", "landlock")
# What the weakest way does not protect from.
_LANDLOCK_GAPS = (
    ".git and other protected paths in the project folder can be written",
    "names and sizes of files outside can be seen (not their content)",
    "modes and times of files outside can be changed (not their content)",
    "processes outside can be listed (not read or ended)",
)
# Gaps of older kernels, and the version of Landlock that closes them.
_OLD_LANDLOCK_GAPS = (
    (3, "files outside can be emptied (the kernel's Landlock is too old)"),
    (6, "processes outside can be ended, and programs can be left running (the kernel's Landlock is too old)"),
)


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A way to run commands that was tried on this machine."""

    way: str  # of WAYS
    plan: SandboxPlan
    program: str | None  # bubblewrap
    gaps: tuple[str, ...] = ()  # what it does not protect from

    @property
    def is_whole(self) -> bool:
        return not self.gaps

    def with_limits(self, limits: SandboxLimits) -> Sandbox:
        return replace(self, plan=replace(self.plan, limits=limits))

    def describe(self) -> str:
        """Returns one line: what protects, and what does not."""
        how = {
            "bubblewrap": "bubblewrap, Landlock and seccomp",
            "namespaces": "namespaces, Landlock and seccomp",
            "landlock": "Landlock and seccomp alone",
        }[self.way]
        line = f"tools run in a sandbox ({how}): {self.plan.folder} is writable, no network, no other files of yours"
        return line if self.is_whole else f"{line}; NOT protected: {'; '.join(self.gaps)}"


def plan_for(way: str, folder: Path, scratch: Path, readable: Sequence[Path] = ()) -> SandboxPlan:
    namespaces = () if way == "landlock" else ALL_NAMESPACES
    return make_plan(folder, scratch, namespaces=namespaces, readable=readable)


def choose_sandbox(
    folder: Path, scratch: Path, *, ways: Sequence[str] = WAYS, readable: Sequence[Path] = ()
) -> Sandbox:
    """Returns the first of `ways` that works here. Raises `QuireError` with each way's failure if none does."""
    failures = []
    for way in ways:
        program = find_bubblewrap() if way == "bubblewrap" else None
        if way == "bubblewrap" and program is None:
            failures.append("bubblewrap: not installed")
            continue
        plan = plan_for(way, folder, scratch, readable)
        try:
            done = run_command(plan, ["/bin/sh", "-c", "echo works"], program, seconds=20)
        except QuireError as error:
            failures.append(f"{way}: {error.what}")
            continue
        if done.output.strip() == "works":
            return Sandbox(way, plan, program, _gaps(way))
        failures.append(f"{way}: a test command failed: {done.output.strip()[:200] or done.note}")
    raise sandbox_failed("; ".join(failures))


def _gaps(way: str) -> tuple[str, ...]:
    if way != "landlock":
        return ()
    abi = landlock_abi()
    return (*_LANDLOCK_GAPS, *(gap for since, gap in _OLD_LANDLOCK_GAPS if abi < since))


def make_scratch() -> tempfile.TemporaryDirectory[str]:
    """Returns a private folder for a session's temporary files, removed with the object."""
    made = tempfile.TemporaryDirectory(prefix="quire-agent-", ignore_cleanup_errors=True)
    (Path(made.name) / "home").mkdir()
    return made
