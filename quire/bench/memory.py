"""How much memory this process takes: now, at its peak, and on a GPU. Benchmarks that load a model ask."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from pathlib import Path

from quire.bench.stats import Report


def resident_bytes() -> int:
    """What is in memory now; where the system does not say, the most there has ever been."""
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return peak_resident_bytes()
    return num_pages * os.sysconf("SC_PAGE_SIZE")


def settle_memory() -> None:
    """Collect garbage and have the allocator give free memory back: what is resident then is what is held.

    Without it readings wander by more than a per cent, with what malloc happened to keep for the next time.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # the GNU C library has it
    if trim is not None:
        trim(0)


def peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB everywhere but there


def peak_memory() -> Report:
    """Peaks since the process began, so loading counts too. The GPU's is what tensors took, not the driver."""
    torch = sys.modules.get("torch")  # whoever loaded a model has imported it; nobody else needs it for this
    on_gpu = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "peak_rss_bytes": peak_resident_bytes(),
        "peak_cuda_bytes": torch.cuda.max_memory_allocated() if torch is not None and on_gpu else None,
    }
