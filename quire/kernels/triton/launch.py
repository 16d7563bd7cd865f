"""Launch options shared by all kernels: programmatic dependent launch, and properties of the device.

Programmatic dependent launch lets a kernel start while the preceding one still runs. Every kernel therefore calls
`wait_for_inputs` before it reads what an earlier kernel wrote, and `let_next_start` as early as possible. A kernel that
reads inputs of the preceding kernel before waiting requires that kernel to call `let_next_start` only after its own
wait. A recurrent layer's decode step reads its state before waiting: no kernel of the same step has written that state,
and every step begins with torch kernels, which start after all earlier kernels have ended.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = bool(triton.knobs.runtime.interpret)
# Gluon is not stable: with another Triton a kernel may not compile (3.7 renamed functions, see `gluon_names`), or may
# deadlock. Before a version is added here, the barriers, fences and waits in each compiled kernel are compared with
# those of a known version, and all kernels are run on a GPU.
KNOWN_GLUON = ("3.6.", "3.7.")


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Allow the next kernel to start, if it was launched with programmatic dependent launch."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until all earlier kernels have ended and their results are visible."""
    if PDL:
        gdc_wait()


def compute_cache_keys(names: dict[str, object]) -> None:
    """Compute the cache keys of a module's kernels; called at its end. Triton looks up a compiled kernel by a hash over
    the functions it calls and the constants they read; constants of a called function count only if that function was
    hashed before. Without this, a process that launches kernels in another order would compile them again."""
    for function in names.values():
        if isinstance(function, triton.JITFunction):
            function.cache_key  # noqa: B018, computing the property stores the hash


@functools.cache
def has_dependent_launch(device_index: int | None) -> bool:
    """Whether the device supports programmatic dependent launch (Hopper and later)."""
    return not INTERPRETED and torch.cuda.get_device_capability(device_index)[0] >= 9


@functools.cache
def supports_gluon(device_index: int | None) -> bool:
    """Whether the device supports the Gluon kernels (Hopper) and this Triton is a version they are known to work with.
    If only the version is unknown, `validation.hopper_trial` reports it."""
    known = triton.__version__.startswith(KNOWN_GLUON)
    return known and not INTERPRETED and torch.cuda.get_device_capability(device_index)[0] == 9


@functools.cache
def num_multiprocessors(device_index: int | None) -> int:
    """Number of the device's multiprocessors; 4 in the interpreter."""
    if INTERPRETED:
        return 4
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def launch_options(device: torch.device, num_warps: int, num_stages: int = 1, early: bool = True) -> dict[str, object]:
    """Keyword arguments of a launch: the kernel's constant PDL and Triton's options. `early`: the kernel may start
    while the preceding one runs."""
    pdl = early and has_dependent_launch(device.index)
    options: dict[str, object] = {"PDL": pdl, "num_warps": num_warps, "num_stages": num_stages}
    if pdl:
        options["launch_pdl"] = True
    return options


def dot_precision(dtype: torch.dtype) -> str:
    """Precision of `tl.dot`: float32 products stay float32, since the matrix units' tf32 would keep ten bits."""
    return "ieee" if dtype == torch.float32 else "tf32"


def index_type(cache: torch.Tensor) -> tl.dtype:
    """Type of a cache's element offsets: 32 bits save instructions where they suffice."""
    return tl.int32 if cache.numel() < 2**31 else tl.int64


def compute_type(q: torch.Tensor, cache: torch.Tensor) -> tl.dtype:
    """Type in which attention multiplies. FP8 converts to float16 exactly and in one instruction; queries, weights and
    scores are small enough for float16."""
    dtype = torch.float16 if cache.dtype == torch.float8_e4m3fn else q.dtype
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[dtype]
