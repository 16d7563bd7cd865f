"""How much memory a device has left, counted the way the kernel would before it kills somebody.

The loader asks before it allocates weights; whoever sizes the cache may ask again.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = [free for free in (_meminfo_available(), _cgroup_available()) if free is not None]
    return min(limits) if limits else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_available() -> int | None:
    """What a container may still take; pages of files that are merely cached do not count as taken."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((CGROUP / "memory.current").read_text())
        stats = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(stats.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None
