"""The hooks of the native library as C structures, and the error of a failed one.

Apart from `hooks`, so that the library can be opened without torch: `quire doctor` does so.
"""

from __future__ import annotations

from ctypes import Structure, c_void_p


class HookFailed(RuntimeError):
    """A hook returned an error code, which ended the call."""


class ReductionDesc(Structure):
    _fields_ = (("call", c_void_p), ("context", c_void_p))


class AdaptersDesc(Structure):
    _fields_ = (("call", c_void_p), ("context", c_void_p))
