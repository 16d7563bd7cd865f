"""Runs one command under limits and ends everything it started, then reports how it ended.

The supervisor is the first process of the sandbox. It ends the sandbox when the command ends, when the processes
together take too much memory or are too many, or when Quire has gone (its end of the lifeline pipe is closed).
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import time
from typing import Any

from quire.agent.sandbox.child import landlock, seccomp

_WATCH_MILLISECONDS = 50  # between two looks at memory and number of processes
_LIMITS = {
    "cpu_seconds": resource.RLIMIT_CPU,
    "process_bytes": resource.RLIMIT_DATA,
    "file_bytes": resource.RLIMIT_FSIZE,
    "open_files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
}


def supervise(plan: dict[str, Any], command: list[str], lifeline: int, status: int) -> int:
    """Returns the command's exit code, and writes a JSON report to `status`."""
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _become(plan, command, lifeline, status)
    reason, code = _watch(plan["limits"], child, lifeline, plan["own_processes"])
    if plan["end_background"] or reason:
        end_descendants(child, alone=plan["own_processes"])
    report = {"exit": code, "reason": reason, "seconds": round(time.monotonic() - started, 4)}
    os.write(status, (json.dumps(report) + "\n").encode())
    return code if code >= 0 else 128 - code


def _become(plan: dict[str, Any], command: list[str], lifeline: int, status: int) -> None:
    """In the child: applies the limits of a process and becomes the command."""
    try:
        os.setsid()
        for name, kind in _LIMITS.items():
            most = plan["limits"].get(name)
            if most is not None:
                _lower(kind, most + (_own_tasks() if name == "processes" and not plan["own_processes"] else 0))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(plan["folder"])
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.close(lifeline)
        os.set_inheritable(status, False)
        _restrict(plan)
    except BaseException as error:
        _report_failure(status, "sandbox", str(error))
    try:
        os.execvpe(command[0], command, plan["environment"])
    except BaseException as error:
        _report_failure(status, "start", f"{command[0]}: {error}")


def _restrict(plan: dict[str, Any]) -> None:
    """Applies Landlock and seccomp to the command alone: its Landlock domain is below the supervisor's, so it can
    neither end the supervisor nor look into it."""
    rules = plan["landlock"]
    if rules is not None:
        paths = rules["readable"], rules["writable"], rules["listable"]
        landlock.restrict(*paths, network=rules["network"], scopes=rules["scopes"])
    if plan["seccomp"]:
        seccomp.install(plan["seccomp"])


def _report_failure(status: int, reason: str, what: str) -> None:
    os.write(status, (json.dumps({"exit": 127, "reason": reason, "error": what}) + "\n").encode())
    os._exit(127)


def _lower(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = most if hard == resource.RLIM_INFINITY else min(most, hard)
    grace = 2 if kind == resource.RLIMIT_CPU else 0  # between the signal that names the limit and the kill
    resource.setrlimit(kind, (value, value + grace if hard == resource.RLIM_INFINITY else value))


def _own_tasks() -> int:
    """The user's tasks outside the sandbox, which the kernel counts too where there is no user namespace."""
    count, own = 0, os.getuid()
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == own:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count


def _watch(limits: dict[str, Any], child: int, lifeline: int, alone: bool) -> tuple[str, int]:
    ended = os.pidfd_open(child)
    poll = select.poll()
    poll.register(lifeline, select.POLLIN | select.POLLHUP)
    poll.register(ended, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll(_WATCH_MILLISECONDS)}
        code = _reap(child)
        if code is not None:
            reason = "cpu" if code == -signal.SIGXCPU else ("file size" if code == -signal.SIGXFSZ else "")
            return reason, code
        if lifeline in ready:
            return "cancelled", -signal.SIGKILL
        found = _processes() if alone else _descendants()
        if len(found) > limits["processes"]:
            return "processes", -signal.SIGKILL
        if _memory(found) > limits["memory_bytes"] and _memory(found, exactly=True) > limits["memory_bytes"]:
            return "memory", -signal.SIGKILL


def _reap(child: int) -> int | None:
    """Collects all processes that have ended. Returns the command's exit code once it has."""
    found = None
    while True:
        try:
            pid, raw = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = os.waitstatus_to_exitcode(raw)


def end_descendants(child: int, *, alone: bool) -> None:
    """Kills all processes of the sandbox but this one, until none is left."""
    for _ in range(1000):
        found = [pid for pid in (_processes() if alone else _descendants()) if pid != os.getpid()]
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        _reap(child)
        if not found:
            return
        time.sleep(0.002)


def _processes() -> list[int]:
    """All processes of this namespace, without the supervisor and the init process."""
    own = {1, os.getpid()}
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in own]


def _descendants() -> list[int]:
    """All processes below this one, where the namespace is shared with others."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields[0] not in (b"Z", b"X"):
                children.setdefault(int(fields[1]), []).append(int(name))
    found, todo = [], [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _memory(pids: list[int], *, exactly: bool = False) -> int:
    """Bytes of anonymous and shared memory that these processes hold. `exactly` counts a page that several share in
    parts, which takes longer."""
    names = (b"Pss_Anon:", b"Pss_Shmem:") if exactly else (b"RssAnon:", b"RssShmem:")
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/{'smaps_rollup' if exactly else 'status'}", "rb") as file:
                total += sum(int(line.split()[1]) * 1024 for line in file if line.startswith(names))
        except (OSError, IndexError, ValueError):
            continue
    return total
