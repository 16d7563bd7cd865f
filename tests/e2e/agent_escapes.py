"""Escapes from the agent's sandbox and abuses of it: a command for each, and the rules that stop it.

Each command prints ESCAPED if it succeeds. `without` takes the rules that stop it out of the plan; the test then wants
to see it succeed, so that a rule that goes missing does not go unnoticed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from quire.agent.sandbox.plan import LandlockRules, SandboxMount, SandboxPlan

ALL_WAYS = ("bubblewrap", "namespaces", "landlock")
OWN_TREE = ("bubblewrap", "namespaces")
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where an escape is tried: a project folder, and a home folder outside of it."""

    project: Path
    home: Path
    tcp_port: int
    tcp6_port: int
    udp_port: int
    abstract: str  # name of an abstract socket
    victim: int  # a process outside


Change = Callable[[SandboxPlan, Place], SandboxPlan]


@dataclass(frozen=True, slots=True)
class Escape:
    name: str
    command: str  # with {home}, {project}, … of the place
    without: Change
    prepare: Change = lambda plan, place: plan  # limits of the trial
    ways: tuple[str, ...] = ALL_WAYS  # where the sandbox promises to stop it
    removable: tuple[str, ...] = ALL_WAYS  # where the rules are all ours to take away


def python(code: str) -> str:
    return "python3 - <<'END'\n" + textwrap.dedent(code).strip() + "\nEND"


CALL = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(number, *args):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    return result, ctypes.get_errno()
"""


def with_calls(code: str) -> str:
    return python(CALL + textwrap.dedent(code))


# -- taking rules away


def _landlock(plan: SandboxPlan, *, readable: tuple[str, ...] = (), writable: tuple[str, ...] = ()) -> SandboxPlan:
    rules = plan.landlock
    assert rules is not None
    changed = replace(rules, readable=(*rules.readable, *readable), writable=(*rules.writable, *writable))
    return replace(plan, landlock=changed)


def shown(path: str) -> Change:
    """The rule that only listed paths can be read."""

    def change(plan: SandboxPlan, place: Place) -> SandboxPlan:
        real = path.format(**vars_of(place))
        mounts = (*plan.mounts, SandboxMount("bind", real, real)) if plan.mounts else ()
        return _landlock(replace(plan, mounts=mounts), readable=(real,))

    return change


def opened(path: str) -> Change:
    """The rule that only the project folder can be written."""

    def change(plan: SandboxPlan, place: Place) -> SandboxPlan:
        real = path.format(**vars_of(place))
        project = SandboxMount("bind", str(place.project), str(place.project), writable=True)
        mounts = (*plan.mounts, SandboxMount("bind", real, real, writable=True), project) if plan.mounts else ()
        return _landlock(replace(plan, mounts=mounts), writable=(real,))

    return change


def rules(*names: str) -> Change:
    return lambda plan, place: replace(plan, seccomp=tuple(name for name in plan.seccomp if name not in names))


def limits(**values: object) -> Change:
    return lambda plan, place: replace(plan, limits=replace(plan.limits, **values))  # type: ignore[arg-type]


def unprotected(plan: SandboxPlan, place: Place) -> SandboxPlan:
    inside = tuple(one for one in plan.mounts if not one.target.startswith(f"{place.project}/"))
    return replace(plan, mounts=inside)


def capable(plan: SandboxPlan, place: Place) -> SandboxPlan:
    return replace(plan, drop_capabilities=False)


def same_network(plan: SandboxPlan, place: Place) -> SandboxPlan:
    open_rules = replace(plan.landlock, network=False, scopes=False) if plan.landlock is not None else None
    namespaces = tuple(name for name in plan.namespaces if name != "net")
    seccomp = tuple(name for name in plan.seccomp if name not in ("all sockets", "socket families"))
    return replace(plan, namespaces=namespaces, landlock=open_rules, seccomp=seccomp)


def same_processes(plan: SandboxPlan, place: Place) -> SandboxPlan:
    """No process namespace, and the system's own /proc."""
    namespaces = tuple(name for name in plan.namespaces if name != "pid")
    mounts = tuple(SandboxMount("bind", "/proc", "/proc") if one.kind == "proc" else one for one in plan.mounts)
    assert isinstance(plan.landlock, LandlockRules)
    unscoped = replace(plan.landlock, scopes=False)
    return replace(plan, namespaces=namespaces, mounts=mounts, landlock=unscoped, end_background=False)


def no_landlock(plan: SandboxPlan, place: Place) -> SandboxPlan:
    return replace(plan, landlock=None)


def more_processes(plan: SandboxPlan, place: Place) -> SandboxPlan:
    mounts = tuple(replace(one, processes=2000) for one in plan.mounts)
    return replace(plan, mounts=mounts, limits=replace(plan.limits, processes=2000))


def settings_open(plan: SandboxPlan, place: Place) -> SandboxPlan:
    mounts = tuple(replace(one, covered=()) if one.kind == "proc" else one for one in plan.mounts)
    return _landlock(replace(plan, mounts=mounts), writable=("/proc",))


def visible(plan: SandboxPlan, place: Place) -> SandboxPlan:
    return replace(plan, hide_memory=False, landlock=None)


def privileged(plan: SandboxPlan, place: Place) -> SandboxPlan:
    return replace(plan, no_new_privileges=False, seccomp=(), landlock=None)


def larger_shared_memory(plan: SandboxPlan, place: Place) -> SandboxPlan:
    mounts = tuple(replace(one, size=512 * MIB) if one.target == "/dev/shm" else one for one in plan.mounts)
    return replace(plan, mounts=mounts)


def both(*changes: Change) -> Change:
    def change(plan: SandboxPlan, place: Place) -> SandboxPlan:
        for one in changes:
            plan = one(plan, place)
        return plan

    return change


def vars_of(place: Place) -> dict[str, object]:
    return {name: getattr(place, name) for name in Place.__slots__}


SHOWN_HOME, OPEN_HOME = shown("{home}"), opened("{home}")
SMALL = limits(memory_bytes=200 * MIB, process_bytes=200 * MIB)
LARGE = limits(memory_bytes=4096 * MIB, process_bytes=4096 * MIB)
ALLOCATE = "data = b'x' * ({size} << 20); import time; time.sleep(0.4)"

ESCAPES: tuple[Escape, ...] = (
    # -- reading what is none of the project's
    Escape("read a key of ~/.ssh", "grep -q SECRET {home}/.ssh/id_test && echo ESCAPED", SHOWN_HOME),
    Escape("list the home folder", "ls {home} | grep -q notes && echo ESCAPED", SHOWN_HOME),
    Escape("read by way of ..", "cd {project}; grep -q SECRET ../home/.ssh/id_test && echo ESCAPED", SHOWN_HOME),
    Escape("read through a link", "ln -sf {home}/.ssh/id_test l; grep -q SECRET l && echo ESCAPED", SHOWN_HOME),
    Escape("read through a linked folder", "ln -sfn {home} d; grep -q SECRET d/.ssh/id_test && echo ESCAPED",
           SHOWN_HOME),
    Escape("read through a hard link", "rm -f h; ln {home}/.ssh/id_test h && grep -q SECRET h && echo ESCAPED",
           OPEN_HOME, removable=("landlock",)),
    Escape("copy the home folder", "cp -r {home}/. copied 2>/dev/null; test -e copied/notes && echo ESCAPED",
           SHOWN_HOME),
    Escape("read /etc/shadow", "test -n \"$(cat /etc/shadow)\" && echo ESCAPED", shown("/etc/shadow")),
    Escape("read through /proc/*/root", "cat /proc/[0-9]*/root{home}/.ssh/id_test 2>/dev/null | grep -q SECRET && "
           "echo ESCAPED", SHOWN_HOME),
    Escape("read through /proc/*/cwd", "cat /proc/[0-9]*/cwd/../home/.ssh/id_test 2>/dev/null | grep -q SECRET && "
           "echo ESCAPED", SHOWN_HOME),
    Escape("read Python's file by its own interpreter",
           python("print('ESCAPED' if 'SECRET' in open('{home}/.ssh/id_test').read() else '')"), SHOWN_HOME),
    Escape("find out that a file exists", "test -e {home}/notes && echo ESCAPED", SHOWN_HOME, ways=OWN_TREE),
    Escape("read the variables of Quire", "test -n \"$SECRET_TOKEN\" && echo ESCAPED",
           lambda plan, place: replace(plan, environment={**plan.environment, "SECRET_TOKEN": "x"})),
    # -- writing outside of the project
    Escape("write to the home folder", "echo x > {home}/written && echo ESCAPED", OPEN_HOME),
    Escape("append to a file outside", "echo x >> {home}/notes && echo ESCAPED", OPEN_HOME),
    Escape("write through a link", "ln -sf {home}/notes w; echo x > w && echo ESCAPED", OPEN_HOME),
    Escape("write through a linked folder", "ln -sfn {home} wd; echo x > wd/written && echo ESCAPED", OPEN_HOME),
    Escape("delete a file outside", "rm -f {home}/spare && test ! -e {home}/spare && echo ESCAPED",
           OPEN_HOME, ways=("landlock",)),
    Escape("delete what can't be seen", "rm {home}/spare && echo ESCAPED", OPEN_HOME),
    Escape("move a file out", "echo x > m; mv m {home}/moved 2>/dev/null && test -e {home}/moved && echo ESCAPED",
           OPEN_HOME),
    Escape("make a folder outside", "mkdir {home}/made && echo ESCAPED", OPEN_HOME),
    Escape("change the mode of a file outside", "chmod 777 {home}/spare && echo ESCAPED", OPEN_HOME, ways=OWN_TREE),
    Escape("plant a hook in .git", "echo 'rm -rf ~' > .git/hooks/pre-commit && echo ESCAPED",
           unprotected, ways=OWN_TREE),
    Escape("move .git away", "mv .git other && echo ESCAPED", unprotected, ways=OWN_TREE),
    Escape("change the project's MCP servers", "echo x >> .mcp.json && echo ESCAPED", unprotected, ways=OWN_TREE),
    Escape("change a setting of the system",
           "v=$(cat /proc/sys/vm/swappiness) && echo $v > /proc/sys/vm/swappiness && echo ESCAPED", settings_open,
           removable=("namespaces", "landlock")),
    # -- privileges
    Escape("make a program setuid", "echo > s; chmod 4755 s && echo ESCAPED", rules("set-id bits")),
    Escape("make a setuid program while opening it",
           python("import os\nos.umask(0); os.open('so', os.O_CREAT | os.O_WRONLY, 0o4755); print('ESCAPED')"),
           rules("set-id bits")),
    Escape("make a setgid folder", "rm -rf sg; mkdir -m 2755 sg && test -g sg && echo ESCAPED", rules("set-id bits")),
    Escape("gain privileges from a program", "grep -q 'NoNewPrivs:.*0' /proc/self/status && echo ESCAPED", privileged,
           removable=("namespaces", "landlock")),
    Escape("use a capability", "grep -q 'CapEff:.*[1-9a-f]' /proc/self/status && echo ESCAPED", capable),
    Escape("mount a file system",
           with_calls("print('ESCAPED' if call(165, b'x', b'/tmp', b'tmpfs', 0, None)[0] == 0 else '')"),
           both(capable, rules("mounts"), no_landlock), ways=OWN_TREE),
    Escape("change the root", with_calls("print('ESCAPED' if call(161, b'/tmp')[0] == 0 else '')"),
           both(capable, rules("mounts")), ways=OWN_TREE),
    Escape("make a user namespace", with_calls("print('ESCAPED' if call(272, 0x10000000)[0] == 0 else '')"),
           rules("namespaces")),
    Escape("clone into a namespace",
           with_calls("""
               result, _ = call(56, 0x10000000 | 17, 0, 0, 0, 0)
               if result == 0: os._exit(0)
               print('ESCAPED' if result > 0 else '')
           """), rules("namespaces")),
    Escape("clone3 into a namespace",
           with_calls("""
               args = (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, 17)
               result, _ = call(435, ctypes.byref(args), 88)
               if result == 0: os._exit(0)
               print('ESCAPED' if result > 0 else '')
           """), rules("namespaces")),
    Escape("open a file by its handle",
           with_calls("""
               handle = (ctypes.c_uint32 * 40)(128)
               mount = ctypes.c_int()
               result, _ = call(303, -100, b'/usr', ctypes.byref(handle), ctypes.byref(mount), 0)
               print('ESCAPED' if result == 0 else '')
           """), rules("file handles")),
    Escape("reach the kernel's keys", with_calls("print('ESCAPED' if call(250, 0, -3, 1)[0] > 0 else '')"),
           rules("keys")),
    Escape("reach the kernel's tracing",
           with_calls("print('ESCAPED' if call(323, 1)[1] not in (1, 38) else '')"), rules("kernel")),
    Escape("use io_uring past the filter",
           with_calls("""
               params = (ctypes.c_uint32 * 30)()
               print('ESCAPED' if call(425, 4, ctypes.byref(params))[0] >= 0 else '')
           """), rules("io_uring")),
    Escape("change the host's name", with_calls("print('ESCAPED' if call(170, b'other', 5)[0] == 0 else '')"),
           both(capable, rules("clock")), ways=OWN_TREE),
    # -- other processes
    Escape("end a process outside", "kill -9 {victim} 2>/dev/null && echo ESCAPED", same_processes),
    Escape("see a process outside", "grep -q sleep /proc/{victim}/comm && echo ESCAPED", same_processes, ways=OWN_TREE),
    Escape("trace a process",
           with_calls("print('ESCAPED' if call(101, 0, 0, 0, 0)[0] == 0 else '')"), rules("other processes' memory")),
    Escape("read a process's memory",
           with_calls("""
               class Span(ctypes.Structure): _fields_ = (('base', ctypes.c_void_p), ('size', ctypes.c_size_t))
               have, into = ctypes.create_string_buffer(b'data'), ctypes.create_string_buffer(4)
               theirs, ours = Span(ctypes.addressof(have), 4), Span(ctypes.addressof(into), 4)
               result, _ = call(310, os.getpid(), ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
               print('ESCAPED' if result == 4 else '')
           """), rules("other processes' memory")),
    Escape("read the supervisor's environment",
           "tr '\\0' '\\n' < /proc/$PPID/environ > e 2>/dev/null; test -s e && echo ESCAPED", visible,
           removable=("namespaces", "landlock")),
    Escape("type into the terminal",
           with_calls("""
               letter = ctypes.c_char(b'x')
               print('ESCAPED' if call(16, 0, 0x5412, ctypes.byref(letter))[1] != 1 else '')
           """), rules("terminal input")),
    # -- the network, by seven ways
    Escape("connect by TCP", "exec 3<>/dev/tcp/127.0.0.1/{tcp_port} && echo ESCAPED", same_network),
    Escape("connect by TCP over IPv6", "exec 3<>/dev/tcp/::1/{tcp6_port} && echo ESCAPED", same_network),
    Escape("send by UDP",
           python("""
               import socket
               s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(2)
               s.sendto(b'hello', ('127.0.0.1', {udp_port}))
               print('ESCAPED' if s.recv(10) == b'answer' else '')
           """), same_network),
    Escape("connect to an abstract socket",
           python("""
               import socket
               s = socket.socket(socket.AF_UNIX); s.connect('\\0{abstract}'); print('ESCAPED')
           """), same_network),
    Escape("connect to a service's socket",
           python("""
               import socket
               s = socket.socket(socket.AF_UNIX); s.connect('{home}/service.sock'); print('ESCAPED')
           """), both(OPEN_HOME, rules("all sockets"))),
    Escape("use another family of sockets",
           with_calls("print('ESCAPED' if call(41, 38, 5, 0)[1] != 97 or call(41, 40, 1, 0)[1] != 97 else '')"),
           rules("socket families", "all sockets")),
    Escape("find any way out", "ls /sys/class/net 2>/dev/null | grep -qv '^lo$' && echo ESCAPED || "
           "(grep -v lo: /proc/net/dev | grep -q : && echo ESCAPED)", same_network, ways=OWN_TREE),
    # -- too much of everything
    Escape("start many processes",
           "for i in $(seq 400); do sleep 3 & done; test $(jobs -r | wc -l) -ge 399 && echo ESCAPED",
           more_processes, limits(processes=100)),
    Escape("take much memory", python(ALLOCATE.format(size=400) + "\nprint('ESCAPED')"), LARGE, SMALL),
    Escape("take much memory in many processes",
           "for i in 1 2 3 4 5 6; do python3 -c \"" + ALLOCATE.format(size=90) + "\" & done; wait; echo ESCAPED",
           LARGE, SMALL),
    Escape("take much memory by a map that is shared",
           python("import mmap, time; m = mmap.mmap(-1, 400 << 20)\nfor i in range(0, 400 << 20, 4096): m[i] = 1\n"
                  "time.sleep(0.4); print('ESCAPED')"), LARGE, SMALL),
    Escape("hide memory in a file without a name",
           with_calls("print('ESCAPED' if call(319, b'x', 0)[0] >= 0 else '')"), rules("uncounted memory")),
    Escape("hide memory in a segment",
           with_calls("print('ESCAPED' if call(29, 0, 4096, 0o1600)[0] >= 0 else '')"), rules("uncounted memory")),
    Escape("fill the shared memory", "head -c 200000000 /dev/zero > /dev/shm/x && echo ESCAPED", larger_shared_memory,
           ways=OWN_TREE),
    Escape("write a huge file", "head -c 30000000 /dev/zero > big && echo ESCAPED", limits(file_bytes=None),
           limits(file_bytes=10_000_000)),
    Escape("open many files", python("kept = [open('/dev/null') for _ in range(400)]; print('ESCAPED')"),
           limits(open_files=1000), limits(open_files=100)),
    Escape("run without end", "sleep 2; echo ESCAPED", limits(seconds=60.0), limits(seconds=0.7)),
    Escape("compute without end", python("import time\nwhile time.process_time() < 2.5: pass\nprint('ESC' + 'APED')"),
           limits(cpu_seconds=None), limits(cpu_seconds=1)),
    Escape("print without end", "yes | head -c 3000000; echo ESCAPED", limits(output_bytes=1 << 30),
           limits(output_bytes=1_000_000)),
)  # fmt: skip
