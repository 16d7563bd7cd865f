"""Landlock: a process gives up all access to files outside a list, and to signals and sockets of other processes.

It needs no privilege and can't be undone. Used beside mounts where the kernel has namespaces, and alone where not.
"""

from __future__ import annotations

import ctypes
import os
import stat

from quire.agent.sandbox.child.syscalls import syscall

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
TRUNCATE, IOCTL_DEV = 1 << 14, 1 << 15
_FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
READ_RIGHTS = EXECUTE | READ_FILE | READ_DIR
_TCP = 1 | 2  # bind, connect
_SCOPES = 1 | 2  # abstract Unix sockets, signals
_ABI_OF_BIT = {13: 2, 14: 3, 15: 5}  # refer, truncate, ioctl on devices
_PATH_BENEATH = 1


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathAttributes(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("fd", ctypes.c_int32))


def landlock_abi() -> int:
    """Returns the kernel's version of Landlock; 0 without it."""
    try:
        return syscall("landlock_create_ruleset", _CREATE, None, 0, 1)
    except OSError:
        return 0


def handled_rights(abi: int) -> int:
    """Returns all rights on files that this version can restrict."""
    rights = (1 << 13) - 1
    for bit, since in _ABI_OF_BIT.items():
        if abi >= since:
            rights |= 1 << bit
    return rights


def restrict(readable: list[str], writable: list[str], listable: list[str], *, network: bool, scopes: bool) -> None:
    """Restricts the calling process to these paths. Paths that do not exist are left out.

    `network`: TCP is restricted too. `scopes`: signals and abstract sockets reach processes of the sandbox only.
    """
    abi = landlock_abi()
    if abi == 0:
        raise OSError(38, "landlock: the kernel has none")
    handled = handled_rights(abi)
    attributes = _RulesetAttributes(handled, _TCP if network and abi >= 4 else 0, _SCOPES if scopes and abi >= 6 else 0)
    size = 8 if abi < 4 else (16 if abi < 6 else 24)
    ruleset = syscall("landlock_create_ruleset", _CREATE, ctypes.byref(attributes), size, 0)
    try:
        for path in readable:
            _allow(ruleset, path, READ_RIGHTS & handled)
        for path in listable:
            _allow(ruleset, path, READ_DIR)
        for path in writable:
            _allow(ruleset, path, handled)
        syscall("landlock_restrict_self", _RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _FILE_RIGHTS
        attributes = _PathAttributes(rights, descriptor)
        syscall("landlock_add_rule", _ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(attributes), 0)
    finally:
        os.close(descriptor)
