"""System calls that Python has no function for: namespaces, mounts, capabilities, process settings.

Every function raises `OSError` with the name of the call if the kernel refuses it.
"""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

NAMESPACES = {
    "user": 0x10000000,
    "mount": 0x00020000,
    "pid": 0x20000000,
    "net": 0x40000000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
}
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_SLAVE = 4096, 16384, 1 << 19
MNT_DETACH = 2
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE, _AT_SYMLINK_NOFOLLOW = -100, 0x8000, 0x100
# The same numbers on x86-64 and ARM64, except for pivot_root and capset.
_MOUNT_SETATTR = 442
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 24, 38
_PR_SET_CHILD_SUBREAPER, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 36, 47, 4


def machine() -> str:
    return os.uname().machine


def check(name: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def syscall(name: str, number: int, *args: object) -> int:
    """Makes a system call by its number. Integers are passed as 64-bit values."""
    wide = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    return check(name, int(_libc.syscall(ctypes.c_long(number), *wide)))


def unshare(names: list[str]) -> None:
    flags = 0
    for name in names:
        flags |= NAMESPACES[name]
    check(f"unshare({', '.join(names)})", _libc.unshare(flags))


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    result = _libc.mount(
        source.encode(), os.fsencode(target), kind.encode() or None, ctypes.c_ulong(flags), data.encode() or None
    )
    check(f"mount {target}", result)


def restrict_mount(path: str, *, read_only: bool, recursive: bool = True) -> None:
    """Makes a mount, and those below it, ignore setuid bits and devices, and read-only if asked."""
    attributes = _ATTR_NOSUID | _ATTR_NODEV | (_ATTR_RDONLY if read_only else 0)
    values = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    flags = _AT_SYMLINK_NOFOLLOW | (_AT_RECURSIVE if recursive else 0)
    syscall(
        f"mount_setattr {path}",
        _MOUNT_SETATTR,
        _AT_FDCWD,
        ctypes.c_char_p(os.fsencode(path)),
        flags,
        ctypes.byref(values),
        ctypes.sizeof(values),
    )


def unmount(path: str) -> None:
    check(f"umount {path}", _libc.umount2(os.fsencode(path), MNT_DETACH))


def pivot_root(new: str, old: str) -> None:
    number = _PIVOT_ROOT[machine()]
    syscall("pivot_root", number, ctypes.c_char_p(os.fsencode(new)), ctypes.c_char_p(os.fsencode(old)))


def prctl(name: str, option: int, *args: int) -> None:
    padded = [ctypes.c_ulong(arg) for arg in (*args, 0, 0, 0, 0)[:4]]
    check(name, _libc.prctl(option, *padded))


def hide_memory() -> None:
    """Makes the calling process's memory and environment unreadable for others of the same user."""
    prctl("prctl(dumpable)", _PR_SET_DUMPABLE, 0)


def adopt_orphans() -> None:
    prctl("prctl(subreaper)", _PR_SET_CHILD_SUBREAPER, 1)


def forbid_new_privileges() -> None:
    prctl("prctl(no_new_privs)", _PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    """Drops all capabilities, also those that a program could gain by being executed."""
    for capability in range(64):
        try:
            prctl("prctl(capbset)", _PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno == 22:  # the kernel knows no more capabilities
                break
            if error.errno != 1:  # without CAP_SETPCAP there is nothing to drop
                raise
    try:
        prctl("prctl(ambient)", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    except OSError as error:
        if error.errno != 22:
            raise
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    nothing = (ctypes.c_uint32 * 6)()
    syscall("capset", _CAPSET[machine()], ctypes.byref(header), ctypes.byref(nothing))
