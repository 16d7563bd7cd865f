"""Memory of this process: resident now, peak resident, and peak on a GPU."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path

from quire.bench.stats import Report


def resident_bytes() -> int:
    """Return the resident set size, or its peak on systems without /proc."""
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return peak_resident_bytes()
    return num_pages * os.sysconf("SC_PAGE_SIZE")


def settle_memory() -> None:
    """Collect garbage and make malloc return free memory to the system.

    Without it, readings vary by more than one per cent with the free memory that malloc keeps.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only in the GNU C library
    if trim is not None:
        trim(0)


def peak_resident_bytes() -> int:
    import resource  # not on every system

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere


def peak_memory() -> Report:
    """Return peaks since the start of the process, loading included. The GPU's peak counts tensors, not the driver."""
    torch = sys.modules.get("torch")  # already imported if a model was loaded
    on_gpu = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "peak_rss_bytes": peak_resident_bytes(),
        "peak_cuda_bytes": torch.cuda.max_memory_allocated() if torch is not None and on_gpu else None,
    }
