"""What every kernel's launch shares: dependent launch, and facts about the card.

Programmatic dependent launch lets a kernel start while the one before it still runs. Every kernel here therefore calls
`wait_for_inputs` before it touches anything an earlier kernel wrote, and `let_next_start` as early as it can. Where one
reads before it waits what the kernel before had read, too, that one lets it start only when it has waited itself. A
recurrent layer's step reads its state before it waits: what was written in this step is not in it, and every step
begins with kernels of torch's, which start when all before them have ended.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = bool(triton.knobs.runtime.interpret)
# Gluon is no settled language: with another Triton a kernel may not compile (3.7 renamed what ours were made of, see
# `gluon_names`), or compile to something that waits forever. Before one is added here: what it makes of each kernel's
# barriers, fences and waits is compared with what another one made, then all of them run on a card.
KNOWN_GLUON = ("3.6.", "3.7.")


@triton.jit
def let_next_start(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


def fix_keys(names: dict[str, object]) -> None:
    """For modules whose functions read constants, once all are defined. Triton finds a compiled kernel by a hash over
    what it calls and reads; what a called function reads counts only if that function was hashed before, so that the
    kernel would be compiled anew by a process that launches its kernels in another order."""
    for function in names.values():
        if isinstance(function, triton.JITFunction):
            function.cache_key  # noqa: B018, hashed when it is asked for


@functools.cache
def has_dependent_launch(device_index: int | None) -> bool:
    return not INTERPRETED and torch.cuda.get_device_capability(device_index)[0] >= 9


@functools.cache
def takes_gluon(device_index: int | None) -> bool:
    """Whether this is a card for the kernels in Gluon (`prefill_hopper`), and this Triton one they are known to run
    with. Where only that is missing, `trial_prompts` says so."""
    known = triton.__version__.startswith(KNOWN_GLUON)
    return known and not INTERPRETED and torch.cuda.get_device_capability(device_index)[0] == 9


@functools.cache
def num_multiprocessors(device_index: int | None) -> int:
    if INTERPRETED:
        return 4
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def launch_options(device: torch.device, num_warps: int, num_stages: int = 1, early: bool = True) -> dict[str, object]:
    """Keyword arguments of a launch: the constant PDL that the kernel takes, and how Triton is to launch it. `early`:
    it may start while the one before it runs."""
    pdl = early and has_dependent_launch(device.index)
    options: dict[str, object] = {"PDL": pdl, "num_warps": num_warps, "num_stages": num_stages}
    if pdl:
        options["launch_pdl"] = True
    return options


def dot_precision(dtype: torch.dtype) -> str:
    """float32 products stay float32: the matrix units' tf32 would keep ten bits."""
    return "ieee" if dtype == torch.float32 else "tf32"


def index_type(cache: torch.Tensor) -> tl.dtype:
    """What counts a cache's elements: 32 bits spare instructions where they suffice."""
    return tl.int32 if cache.numel() < 2**31 else tl.int64


def compute_type(q: torch.Tensor, cache: torch.Tensor) -> tl.dtype:
    """What attention multiplies in. FP8 turns into float16 in one instruction, and exactly; queries, weights and
    scores are small enough for it."""
    dtype = torch.float16 if cache.dtype == torch.float8_e4m3fn else q.dtype
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[dtype]
