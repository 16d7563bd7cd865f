"""Builds the file tree that a sandboxed process sees: a new root with some paths of the old one, read-only or writable.

Called in a mount namespace of its own, and after the fork into a new process namespace, since `/proc` shows that one.
"""

from __future__ import annotations

import os
import stat
from typing import Any

from quire.agent.sandbox.child import syscalls as sys_

_DEVICES = ("null", "zero", "full", "random", "urandom")
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
_BASE = "/tmp"  # any folder of the old root: the new root is built on a file system mounted there


def enter_tree(mounts: list[dict[str, Any]]) -> None:
    """Makes a tree of these mounts the process's root. Everything else is out of reach."""
    sys_.mount("none", "/", flags=sys_.MS_REC | sys_.MS_SLAVE)
    sys_.mount("tmpfs", _BASE, "tmpfs", sys_.MS_NOSUID | sys_.MS_NODEV, "mode=755")
    os.makedirs(f"{_BASE}/new")
    os.makedirs(f"{_BASE}/old")
    sys_.pivot_root(_BASE, f"{_BASE}/old")
    os.chdir("/")
    sys_.mount("/new", "/new", flags=sys_.MS_BIND)
    for mount in mounts:
        _MAKERS[mount["kind"]](mount)
    sys_.unmount("/old")
    os.chdir("/new")
    sys_.pivot_root(".", ".")
    sys_.unmount(".")
    os.chdir("/")
    sys_.restrict_mount("/", read_only=True, recursive=False)


def _bind(mount: dict[str, Any]) -> None:
    source, target = "/old" + mount["source"], "/new" + mount["target"]
    _make_place(target, is_folder=os.path.isdir(source))
    sys_.mount(source, target, flags=sys_.MS_BIND | sys_.MS_REC)
    sys_.restrict_mount(target, read_only=not mount["writable"])


def _link(mount: dict[str, Any]) -> None:
    target = "/new" + mount["target"]
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.symlink(mount["source"], target)


def _tmpfs(mount: dict[str, Any]) -> None:
    target = "/new" + mount["target"]
    _make_place(target, is_folder=True)
    data = f"mode={mount['mode']:o},size={mount['size']}"
    sys_.mount("tmpfs", target, "tmpfs", sys_.MS_NOSUID | sys_.MS_NODEV, data)


def _proc(mount: dict[str, Any]) -> None:
    target = "/new" + mount["target"]
    _make_place(target, is_folder=True)
    sys_.mount("proc", target, "proc", sys_.MS_NOSUID | sys_.MS_NODEV | sys_.MS_NOEXEC)
    _limit_processes(f"{target}/sys/kernel/pid_max", mount["processes"])
    for name in mount["covered"]:
        path = f"{target}/{name}"
        if os.path.exists(path):
            sys_.mount(path, path, flags=sys_.MS_BIND | sys_.MS_REC)
            sys_.restrict_mount(path, read_only=True)


def _limit_processes(path: str, most: int) -> None:
    """Bounds the process ids of this namespace, which newer kernels keep for each one. The kernel's least is 301, and
    the supervisor's own count holds below that."""
    if os.getpid() == 1:
        try:
            with open(path, "w") as file:
                file.write(str(max(301, most)))
        except OSError:
            pass  # an older kernel has one bound for all namespaces, and refuses


def _dev(mount: dict[str, Any]) -> None:
    target = "/new" + mount["target"]
    _make_place(target, is_folder=True)
    sys_.mount("tmpfs", target, "tmpfs", sys_.MS_NOSUID, "mode=755,size=1m")
    for name in _DEVICES:
        _make_place(f"{target}/{name}", is_folder=False)
        sys_.mount(f"/old/dev/{name}", f"{target}/{name}", flags=sys_.MS_BIND)
    for name, source in _LINKS.items():
        os.symlink(source, f"{target}/{name}")


_MAKERS = {"bind": _bind, "link": _link, "tmpfs": _tmpfs, "proc": _proc, "dev": _dev}


def _make_place(path: str, *, is_folder: bool) -> None:
    """Makes the mount point, unless an earlier mount holds it already. A link on the way is refused: it could lead
    out of the new root, where making anything would be an escape."""
    at = path
    while at != "/new":
        if os.path.islink(at):
            raise OSError(40, f"mount {path}: {at.removeprefix('/new')} is a link")
        at = os.path.dirname(at)
    if is_folder:
        os.makedirs(path, exist_ok=True)
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        found = os.stat(path)
    except FileNotFoundError:
        with open(path, "w"):
            return
    if stat.S_ISDIR(found.st_mode):
        raise OSError(21, f"mount {path}: a folder is in the place of a file")
