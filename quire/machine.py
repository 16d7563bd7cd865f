"""Reads what this process may use of the machine: processor, cores, memory, and installed packages.

`quire doctor` prints it. Limits of a container are included. Needs no torch.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources of this machine, within the limits of a container."""

    system: str
    cpu: str
    num_cores: int  # of the hardware
    num_usable_cores: int  # within CPU affinity and the container's quota
    memory_total: int | None  # bytes; None if the system does not report it
    memory_available: int | None  # bytes


@dataclass(frozen=True, slots=True)
class Package:
    """A dependency that `quire doctor` checks."""

    name: str
    why: str
    required: bool
    install: str  # requirement for pip


PACKAGES = (
    Package("torch", "tensors", True, "torch>=2.11,<=2.13.0"),
    Package("numpy", "reading weights", True, "numpy>=1.26"),
    Package("tokenizers", "text to tokens", True, "tokenizers>=0.21,<0.24"),
    Package("safetensors", "weights from the hub", True, "safetensors>=0.4.5"),
    Package("jinja2", "chat templates", True, "jinja2>=3.1.4"),
    Package("rich", "progress and tables", True, "rich>=13"),
    Package("llguidance", "structured output", True, "llguidance>=1.9,<2"),
    Package("msgspec", "messages between processes", True, "msgspec>=0.19"),
    Package("pyzmq", "messages between processes", True, "pyzmq>=26"),
    Package("fastapi", "HTTP routes", True, "fastapi>=0.115"),
    Package("uvicorn", "HTTP server", True, "uvicorn>=0.34"),
    Package("uvloop", "a fast event loop", False, "uvloop>=0.21"),
    Package("httptools", "reading HTTP", True, "httptools>=0.6"),
    Package("prometheus-client", "metrics", True, "prometheus-client>=0.20"),
    Package("triton", "GPU kernels", False, "triton"),
)


def read_machine(root: Path = Path("/")) -> Machine:
    """Returns this machine's resources. `root`: folder with proc and sys; tests pass their own."""
    num_cores = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else num_cores
    quota = _core_quota(root)
    total, available = _memory(root)
    return Machine(
        system=f"{platform.system()} {platform.release()} ({platform.machine()})",
        cpu=_cpu_name(root),
        num_cores=num_cores,
        num_usable_cores=max(1, allowed if quota is None else min(allowed, int(quota))),
        memory_total=total,
        memory_available=available,
    )


def num_memory_kills(root: Path = Path("/")) -> int:
    """Returns the number of processes that the out-of-memory killer has ended in this control group.

    Without that counter it is the machine's number, and 0 without either.
    """
    for folder in _cgroup_folders(root):
        for line in _read(folder / "memory.events").splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill" and value.isdigit():
                return int(value)
    for line in _read(root / "proc/vmstat").splitlines():
        key, _, value = line.partition(" ")
        if key == "oom_kill" and value.isdigit():
            return int(value)
    return 0


def installed_version(name: str) -> str | None:
    """Returns the version of an installed package; None if it is missing."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def has_nvidia_driver(root: Path = Path("/")) -> bool:
    return (root / "proc/driver/nvidia/version").exists()


def may_have_gpu(root: Path = Path("/")) -> bool:
    """Whether there are signs of a GPU. A container may have the device files but no driver entry in /proc."""
    return has_nvidia_driver(root) or any((root / "dev" / name).exists() for name in ("nvidiactl", "nvidia0", "dxg"))


def nvidia_card_names(root: Path = Path("/")) -> tuple[str, ...]:
    """Returns the name of each GPU of the driver, such as "NVIDIA H200"; empty without a driver."""
    texts = [_read(path) for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))]
    return tuple(found.group(1).strip() for text in texts if (found := re.search(r"^Model:\s*(.+)$", text, re.M)))


def nvidia_driver_version(root: Path = Path("/")) -> str | None:
    """Returns the driver's version, such as "580.95.05"; None if there is no driver or no such version."""
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", _read(root / "proc/driver/nvidia/version"))
    return found.group(1) if found else None


# ---------------------------------------------------------------------------------------------------------------------
# Linux has these values in files; on other systems most of them are None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _cpu_name(root: Path) -> str:
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "unknown"


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """Yields this process's control group and its parents; the smallest limit of all applies."""
    top = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, path = line.partition("::")
        if number == "0":
            folder = top / path.strip().lstrip("/")
            while folder != top and top in folder.parents:
                yield folder
                folder = folder.parent
    yield top


def _core_quota(root: Path) -> float | None:
    quotas = []
    for folder in _cgroup_folders(root):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    old = root / "sys/fs/cgroup/cpu"  # version 1
    quota, period = _read(old / "cpu.cfs_quota_us").strip(), _read(old / "cpu.cfs_period_us").strip()
    if quota.isdigit() and period.isdigit() and int(period):
        quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _memory(root: Path) -> tuple[int | None, int | None]:
    """Returns total and available bytes within the tightest limit."""
    known = {}
    for line in _read(root / "proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        amount = value.split()
        if amount and amount[0].isdigit():
            known[key] = int(amount[0]) * 1024
    total, available = known.get("MemTotal"), known.get("MemAvailable")
    if total is None or available is None:
        return total, available
    for limit, used in _memory_limits(root):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return total, available


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yields every memory limit with its current usage, without file cache that the kernel can reclaim."""
    places = [(folder, "memory.max", "memory.current") for folder in _cgroup_folders(root)]
    places.append((root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))  # version 1
    for folder, limit_name, used_name in places:
        limit, used = _read(folder / limit_name).strip(), _read(folder / used_name).strip()
        if limit.isdigit() and used.isdigit():
            yield int(limit), max(0, int(used) - _file_cache(folder))


def _file_cache(folder: Path) -> int:
    for line in _read(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "total_inactive_file") and value.isdigit():
            return int(value)
    return 0
