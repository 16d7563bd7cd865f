"""What a sandboxed process may reach, as plain data: mounts, namespaces, Landlock paths, seccomp rules, limits.

`make_plan` writes it for one project folder. Bubblewrap and the native launcher apply the same plan, so a rule that is
not in the plan is applied by neither. Paths that hold secrets are out of reach because only listed paths are shown.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quire.types import QuireError

ALL_NAMESPACES = ("user", "mount", "pid", "net", "ipc", "uts")
SYSTEM_FOLDERS = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/opt",
    "/nix/store",
    "/run/current-system",
)
# Of /etc, what programs need; not shadow, ssh, sudoers or a service's keys.
SYSTEM_FILES = tuple(
    f"/etc/{name}"
    for name in (
        "alternatives",
        "bash.bashrc",
        "ca-certificates",
        "debian_version",
        "fonts",
        "group",
        "hosts",
        "inputrc",
        "java-17-openjdk",
        "ld.so.cache",
        "ld.so.conf",
        "ld.so.conf.d",
        "locale.alias",
        "locale.conf",
        "localtime",
        "magic",
        "mime.types",
        "nsswitch.conf",
        "os-release",
        "passwd",
        "perl",
        "pki/ca-trust",
        "pki/tls/certs",
        "profile",
        "protocols",
        "python3",
        "python3.11",
        "python3.12",
        "python3.13",
        "services",
        "ssl/certs",
        "ssl/openssl.cnf",
        "terminfo",
        "timezone",
    )
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
PROC_SETTINGS = ("sys", "sysrq-trigger", "irq", "bus", "fs")  # the system's settings, which root could change
PROTECTED = (".git", ".hg", ".mcp.json", ".quire")  # in the project folder; other programs run what they hold
SECCOMP_RULES = (
    "other processes' memory",
    "mounts",
    "namespaces",
    "kernel",
    "keys",
    "clock",
    "file handles",
    "io_uring",
    "uncounted memory",
    "terminal input",
    "set-id bits",
    "socket families",
)
PASSED_VARIABLES = ("LANG", "LC_ALL", "LC_CTYPE", "TZ", "VIRTUAL_ENV", "CONDA_PREFIX", "CARGO_HOME", "GOPATH")
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Bounds on one call. `None` leaves a bound out."""

    seconds: float = 120.0  # maximum duration of a call
    cpu_seconds: int | None = 600  # processor time of each process
    memory_bytes: int = 4 * GIB  # memory of all processes together
    process_bytes: int | None = 4 * GIB  # data of each process
    processes: int = 256
    file_bytes: int | None = 2 * GIB  # size of each file that is written
    open_files: int | None = 1024
    output_bytes: int = 16 << 20  # maximum output; a call with more is ended


@dataclass(frozen=True, slots=True)
class SandboxMount:
    kind: str  # bind, link, tmpfs, proc, dev
    target: str
    source: str = ""  # for a link, what it points to
    writable: bool = False
    size: int = 64 << 20
    mode: int = 0o755
    processes: int = 0  # for proc
    covered: tuple[str, ...] = ()  # for proc: read-only parts


@dataclass(frozen=True, slots=True)
class LandlockRules:
    readable: tuple[str, ...]
    writable: tuple[str, ...]
    listable: tuple[str, ...]  # folders whose names may be listed, with all below
    network: bool  # TCP is denied
    scopes: bool  # signals and abstract sockets stay in the sandbox


@dataclass(frozen=True, slots=True)
class SandboxPlan:
    """Everything that is applied to one sandboxed process."""

    folder: str
    mounts: tuple[SandboxMount, ...]
    namespaces: tuple[str, ...]
    landlock: LandlockRules | None
    seccomp: tuple[str, ...]
    limits: SandboxLimits
    environment: Mapping[str, str] = field(default_factory=dict)
    hide_memory: bool = True  # the supervisor's
    drop_capabilities: bool = True
    no_new_privileges: bool = True
    end_background: bool = True  # what a command leaves running is ended with it

    @property
    def own_processes(self) -> bool:
        """Whether the sandbox has a process namespace of its own."""
        return "pid" in self.namespaces

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "environment": dict(self.environment), "own_processes": self.own_processes}


def make_plan(
    folder: Path,
    scratch: Path,
    *,
    limits: SandboxLimits | None = None,
    readable: Sequence[Path] = (),
    namespaces: Sequence[str] = ALL_NAMESPACES,
    environment: Mapping[str, str] | None = None,
) -> SandboxPlan:
    """Returns the plan for a project folder.

    `scratch` is the session's own folder for temporary files, shown as /var/tmp where mounts are possible; /tmp is then
    emptied after each call. Without namespaces the plan relies on Landlock and on a ban on all sockets.
    """
    folder, scratch = check_folder(folder), scratch.resolve()
    limits = limits or SandboxLimits()
    shown = [path for path in (*SYSTEM_FOLDERS, *SYSTEM_FILES) if os.path.lexists(path)]
    programs = _outermost([*_own_folders(), *(str(path.resolve()) for path in readable)])
    protected = _protected(folder, programs)
    has_mounts = "mount" in namespaces
    temporary = _scratch_place(folder, programs) if has_mounts else str(scratch)
    kept = SandboxMount("bind", temporary, str(scratch), writable=True)
    mounts = _mounts(shown, programs, folder, kept, protected, limits) if has_mounts else ()
    variables = _variables(os.environ if environment is None else environment, temporary, [*shown, *programs, folder])
    rules = LandlockRules(
        readable=(*shown, *programs, "/proc", *(("/dev",) if has_mounts else ())),
        writable=(str(folder), temporary, *(("/tmp", "/dev/shm") if has_mounts else ()), *DEVICES),
        listable=("/",) if has_mounts else (),
        network="net" not in namespaces,
        scopes=True,
    )
    seccomp = SECCOMP_RULES if "net" in namespaces else (*SECCOMP_RULES, "all sockets")
    return SandboxPlan(str(folder), mounts, tuple(namespaces), rules, seccomp, limits, variables)


def check_folder(folder: Path) -> Path:
    """Returns the real path of a project folder. The home folder and folders of the system are refused, since all in
    the project folder can be read and written."""
    real, home = folder.resolve(), Path.home().resolve()
    if not real.is_dir():
        raise QuireError("invalid_folder", f"{folder} is no folder.", "Start in a project's folder.")
    is_system = any(real == Path(path).resolve() for path in (*SYSTEM_FOLDERS, "/etc", "/var", "/tmp", "/home", "/dev"))
    if is_system or real == home or real in home.parents:
        what = f"{real} is no project folder: tools may read and write all of it, and it holds more than a project."
        raise QuireError("invalid_folder", what, "Start in the project's own folder, or name it with --folder.")
    return real


def _own_folders() -> list[str]:
    """The folders of the running Python and of this package."""
    package = Path(__file__).resolve().parents[2]
    own = [sys.prefix, sys.base_prefix, str(Path(os.path.realpath(sys.executable)).parent)]
    return [*(os.path.realpath(path) for path in own), str(package / "__init__.py"), str(package / "agent")]


def _outermost(paths: list[str]) -> list[str]:
    """The paths that are not below another one or below a folder of the system."""
    kept: list[str] = []
    for path in sorted(set(paths), key=len):
        above = [*kept, *SYSTEM_FOLDERS]
        if path != "/" and not any(path == one or path.startswith(one.rstrip("/") + "/") for one in above):
            kept.append(path)
    return kept


def _protected(folder: Path, programs: Sequence[str]) -> list[str]:
    """What stays read-only in the project folder: what other programs run, this Python, and this package."""
    inside = [path for path in programs if Path(path).is_relative_to(folder) and Path(path) != folder]
    own = [str(folder / name) for name in PROTECTED if (folder / name).exists() and not (folder / name).is_symlink()]
    return [*own, *inside]


def _scratch_place(folder: Path, programs: Sequence[str]) -> str:
    """Where the session's temporary files show. No other mount lies below it: a link that a tool left there would
    lead a later mount out of the sandbox."""
    others = [str(folder), *programs]
    return next(place for place in ("/var/tmp", "/scratch") if not any(one.startswith(place) for one in others))


def _mounts(
    shown: Sequence[str],
    programs: Sequence[str],
    folder: Path,
    scratch: SandboxMount,
    protected: Sequence[str],
    limits: SandboxLimits,
) -> tuple[SandboxMount, ...]:
    system = [
        SandboxMount("link", path, os.readlink(path))
        if _is_system_link(path)
        else SandboxMount("bind", path, os.path.realpath(path))
        for path in shown
    ]
    places = [
        SandboxMount("proc", "/proc", processes=limits.processes, covered=PROC_SETTINGS),
        SandboxMount("dev", "/dev"),
        SandboxMount("tmpfs", "/dev/shm", mode=0o1777),
        SandboxMount("tmpfs", "/tmp", size=256 << 20, mode=0o1777),
        scratch,
    ]
    outside = [SandboxMount("bind", path, path) for path in programs if path not in protected]
    project = SandboxMount("bind", str(folder), str(folder), writable=True)
    inner = [SandboxMount("bind", path, path) for path in protected]
    return (*system, *places, *outside, project, *inner)


def _is_system_link(path: str) -> bool:
    """Whether it is a link such as /bin -> usr/bin, whose target is shown too."""
    return os.path.islink(path) and path.count("/") == 1


def _variables(given: Mapping[str, str], temporary: str, visible: Sequence[str | Path]) -> dict[str, str]:
    """The environment: no secrets, and of the search path what is visible."""
    seen = [str(path).rstrip("/") for path in visible]
    path = [
        entry
        for entry in given.get("PATH", "").split(":")
        if os.path.isabs(entry) and any(entry == one or entry.startswith(one + "/") for one in seen)
    ]
    standard = [entry for entry in ("/usr/local/bin", "/usr/bin", "/bin") if entry not in path]
    passed = {name: given[name] for name in PASSED_VARIABLES if name in given}
    return {
        "LANG": "C.UTF-8",
        **passed,
        "PATH": ":".join([*path, *standard]),
        "HOME": f"{temporary}/home",
        "TMPDIR": temporary,
        "TERM": "dumb",
        "PAGER": "cat",
        "GIT_PAGER": "cat",
        "QUIRE_SANDBOX": "1",
    }
