"""The entry of a sandboxed process: applies a plan to itself, then supervises the command.

Where the plan asks for namespaces, it makes them and a file tree of its own; where bubblewrap has done so before, the
plan asks for none. Every step of the plan must succeed, or the command does not run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from quire.agent.sandbox.child import mounts, syscalls
from quire.agent.sandbox.child.supervise import supervise

FAILED = 125  # exit code if a step of the plan failed


def main() -> int:
    """Arguments: the descriptors of the plan as JSON, of the lifeline and of the status pipe, then the command."""
    lifeline, status = int(sys.argv[2]), int(sys.argv[3])
    command = sys.argv[4:]
    with open(int(sys.argv[1]), "rb") as file:
        plan = json.load(file)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Quire decides what Ctrl-C ends
    try:
        if plan["namespaces"]:
            _enter_namespaces(plan)
            child = os.fork()
            if child:
                return _wait(child, lifeline, status)
            if plan["mounts"]:
                mounts.enter_tree(plan["mounts"])
        _give_up_rights(plan)
    except Exception as error:
        report = {"exit": FAILED, "reason": "sandbox", "error": str(error)}
        os.write(status, (json.dumps(report) + "\n").encode())
        return FAILED
    return supervise(plan, command, lifeline, status)


def _enter_namespaces(plan: dict[str, Any]) -> None:
    user, group = os.getuid(), os.getgid()
    syscalls.unshare(plan["namespaces"])
    if "user" in plan["namespaces"]:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
    if "net" in plan["namespaces"]:
        _raise_loopback()


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _raise_loopback() -> None:
    """Brings up the loopback device of the new network, so that a test can talk to its own server."""
    import fcntl
    import socket
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sh14x", b"lo", 1 | 64)  # up, running
        fcntl.ioctl(probe.fileno(), 0x8914, request)


def _give_up_rights(plan: dict[str, Any]) -> None:
    """What the supervisor itself gives up, and so the command too. `supervise` takes more from the command."""
    if not plan["own_processes"]:
        syscalls.adopt_orphans()
    if plan["hide_memory"]:
        syscalls.hide_memory()
    if plan["drop_capabilities"]:
        syscalls.drop_capabilities()
    if plan["no_new_privileges"]:
        syscalls.forbid_new_privileges()


def _wait(child: int, lifeline: int, status: int) -> int:
    """Waits for the first process of the new namespace, whose end ends all of that namespace."""
    os.close(lifeline)
    os.close(status)
    _, raw = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(raw)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
