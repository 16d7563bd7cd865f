"""A plan as the options of bubblewrap, which makes the namespaces and mounts. The rest is applied by `child`."""

from __future__ import annotations

import os
import shutil

from quire.agent.sandbox.plan import SandboxMount, SandboxPlan

_UNSHARE = {
    "user": "--unshare-user",
    "pid": "--unshare-pid",
    "net": "--unshare-net",
    "ipc": "--unshare-ipc",
    "uts": "--unshare-uts",
}


def find_bubblewrap() -> str | None:
    return shutil.which("bwrap")


def bubblewrap_arguments(plan: SandboxPlan) -> bytes:
    """Returns the options as `--args` reads them from a descriptor, each ended by a zero byte."""
    words = ["--clearenv", "--new-session"]
    words += [_UNSHARE[name] for name in plan.namespaces if name in _UNSHARE]
    if plan.drop_capabilities:
        words += ["--cap-drop", "ALL"]
    for mount in plan.mounts:
        words += _mount_words(mount)
    words += ["--remount-ro", "/", "--chdir", "/"]
    return b"".join(os.fsencode(word) + b"\0" for word in words)


def _mount_words(mount: SandboxMount) -> list[str]:
    if mount.kind == "bind":
        return ["--bind" if mount.writable else "--ro-bind", mount.source, mount.target]
    if mount.kind == "link":
        return ["--symlink", mount.source, mount.target]
    if mount.kind == "tmpfs":
        return ["--perms", f"{mount.mode:04o}", "--size", str(mount.size), "--tmpfs", mount.target]
    return [f"--{mount.kind}", mount.target]
