"""seccomp: the system calls that a sandboxed process may not make, as a filter in the kernel's BPF.

Each rule has a name and stands for one kind of escape; a plan lists the names that apply. What is not denied is
allowed. Calls of a foreign architecture end the process.
"""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

from quire.agent.sandbox.child.syscalls import check, machine

EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
_NEW_NAMESPACES = 0x7E020000  # mount, cgroup, uts, ipc, user, pid, net
_SET_ID_BITS = 0o6000
_O_CREAT, _O_TMPFILE = 0o100, 0o20000000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16

Instruction = tuple[int, int, int, int]  # operation, jump if true, jump if false, operand

# name: (x86-64, ARM64); None: the architecture has no such call
NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chmod": (90, None),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "clone": (56, 220),
    "clone3": (435, 435),
    "creat": (85, None),
    "delete_module": (176, 106),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioctl": (16, 29),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "name_to_handle_at": (303, 264),
    "open": (2, None),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "openat": (257, 56),
    "openat2": (437, 437),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "shmget": (29, 194),
    "socket": (41, 198),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


class Denial(NamedTuple):
    """One denied use of a call: always, or where an argument has these bits, or one of these values."""

    call: str
    error: int = EPERM
    argument: int | None = None
    bits: int = 0
    values: tuple[int, ...] = ()
    only_values: tuple[int, ...] = ()  # every other value is denied
    if_flags: tuple[int, int] | None = None  # (argument, bits): only where these are set as well


def _deny(*calls: str) -> tuple[Denial, ...]:
    return tuple(Denial(call) for call in calls)


RULES: dict[str, tuple[Denial, ...]] = {
    "other processes' memory": _deny("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp"),
    "mounts": _deny(
        "mount",
        "umount2",
        "pivot_root",
        "chroot",
        "move_mount",
        "open_tree",
        "fsopen",
        "fsconfig",
        "fsmount",
        "fspick",
        "mount_setattr",
    ),
    "namespaces": (
        *_deny("unshare", "setns"),
        Denial("clone", argument=0, bits=_NEW_NAMESPACES),
        Denial("clone3", ENOSYS),  # its flags lie in memory, which a filter can't read; libc then uses clone
    ),
    "kernel": _deny(
        "bpf",
        "perf_event_open",
        "userfaultfd",
        "kexec_load",
        "kexec_file_load",
        "init_module",
        "finit_module",
        "delete_module",
        "reboot",
        "swapon",
        "swapoff",
        "acct",
        "quotactl",
        "syslog",
        "vhangup",
    ),
    "keys": _deny("keyctl", "add_key", "request_key"),
    "clock": _deny("settimeofday", "clock_settime", "clock_adjtime", "sethostname", "setdomainname"),
    "file handles": _deny("open_by_handle_at", "name_to_handle_at"),
    "io_uring": (*(Denial(f"io_uring_{part}", ENOSYS) for part in ("setup", "enter", "register")),),
    "uncounted memory": (*_deny("shmget", "memfd_secret"), Denial("memfd_create", ENOSYS)),
    "terminal input": (Denial("ioctl", argument=1, values=(_TIOCSTI, _TIOCLINUX)),),
    "set-id bits": (
        Denial("chmod", argument=1, bits=_SET_ID_BITS),
        Denial("fchmod", argument=1, bits=_SET_ID_BITS),
        Denial("fchmodat", argument=2, bits=_SET_ID_BITS),
        Denial("fchmodat2", argument=2, bits=_SET_ID_BITS),
        Denial("mkdir", argument=1, bits=_SET_ID_BITS),
        Denial("mkdirat", argument=2, bits=_SET_ID_BITS),
        Denial("mknod", argument=1, bits=_SET_ID_BITS),
        Denial("mknodat", argument=2, bits=_SET_ID_BITS),
        Denial("creat", argument=1, bits=_SET_ID_BITS),
        Denial("open", argument=2, bits=_SET_ID_BITS, if_flags=(1, _O_CREAT | _O_TMPFILE)),
        Denial("openat", argument=3, bits=_SET_ID_BITS, if_flags=(2, _O_CREAT | _O_TMPFILE)),
        Denial("openat2", ENOSYS),  # its mode lies in memory
    ),
    "socket families": (
        Denial("socket", EAFNOSUPPORT, argument=0, only_values=(AF_UNIX, AF_INET, AF_INET6, AF_NETLINK)),
    ),
    "all sockets": (Denial("socket", EAFNOSUPPORT),),
}


def build_filter(names: list[str], architecture: str) -> list[Instruction]:
    """Returns the program for these rules."""
    column = 0 if architecture == "x86_64" else 1
    program: list[Instruction] = [
        (_LOAD, 0, 0, 4),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[architecture]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, 0),
    ]
    if architecture == "x86_64":
        program += [(_JUMP_ABOVE, 0, 1, _X32_BIT), (_RETURN, 0, 0, _ERRNO | ENOSYS)]
    for name in names:
        for denial in RULES[name]:
            number = NUMBERS[denial.call][column]
            if number is not None:
                body = _body(denial)
                program += [(_JUMP_EQUAL, 0, len(body), number), *body]
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def _body(denial: Denial) -> list[Instruction]:
    """Returns what runs for the denied call. It ends with the call's number loaded again, for the next rule."""
    deny: Instruction = (_RETURN, 0, 0, _ERRNO | denial.error)
    again: Instruction = (_LOAD, 0, 0, 0)
    if denial.argument is None:
        return [deny]
    load: Instruction = (_LOAD, 0, 0, _place(denial.argument))
    if denial.only_values:
        tests: list[Instruction] = [
            (_JUMP_EQUAL, len(denial.only_values) - index, 0, value) for index, value in enumerate(denial.only_values)
        ]
        return [load, *tests, deny, again]
    tests = [(_JUMP_EQUAL, len(denial.values) - index, 0, value) for index, value in enumerate(denial.values)]
    if denial.bits:
        tests = [(_JUMP_SET, 1, 0, denial.bits)]
    ask: list[Instruction] = [load, *tests, (_JUMP_EQUAL, 1, 1, 0), deny, again]
    ask[-3] = (0x05, 0, 0, 1)  # jump over the denial
    if denial.if_flags is not None:
        argument, bits = denial.if_flags
        ask = [(_LOAD, 0, 0, _place(argument)), (_JUMP_SET, 0, len(ask) - 1, bits), *ask]
    return ask


def _place(argument: int) -> int:
    return 16 + 8 * argument  # of its low half, on little-endian machines


def install(names: list[str]) -> None:
    """Applies the rules to the calling process and all that it starts. Needs `no_new_privs`."""
    program = build_filter(names, machine())
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    described = _FilterProgram(len(program), ctypes.cast(buffer, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    check("seccomp", libc.prctl(22, ctypes.c_ulong(2), ctypes.byref(described), ctypes.c_ulong(0), ctypes.c_ulong(0)))
