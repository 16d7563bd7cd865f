"""What this process may use of the machine: processor, cores, memory, and which packages are installed.

`doctor` shows it. Limits of a container count as much as what the hardware has, so both are read; torch is not needed.
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
    system: str
    cpu: str
    num_cores: int  # the hardware's
    num_usable_cores: int  # what affinity and the container's quota leave of them
    memory_total: int | None  # bytes, within the container's limit
    memory_available: int | None


@dataclass(frozen=True, slots=True)
class Package:
    name: str
    why: str
    required: bool
    install: str  # what to ask pip for


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
    Package("uvloop", "a fast event loop", True, "uvloop>=0.21"),
    Package("httptools", "reading HTTP", True, "httptools>=0.6"),
    Package("prometheus-client", "metrics", True, "prometheus-client>=0.20"),
    Package("triton", "GPU kernels", False, "triton"),
)


def read_machine(root: Path = Path("/")) -> Machine:
    """`root` is where /proc and /sys are; a test puts its own there."""
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
    """How many processes the system has ended for lack of memory: of our control group, or where that is not counted of
    the whole machine; 0 where neither is."""
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
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def has_nvidia_driver(root: Path = Path("/")) -> bool:
    return (root / "proc/driver/nvidia/version").exists()


def may_have_gpu(root: Path = Path("/")) -> bool:
    """Whether it is worth asking; in a container a device may be all there is of a driver."""
    return has_nvidia_driver(root) or any((root / "dev" / name).exists() for name in ("nvidiactl", "nvidia0", "dxg"))


def nvidia_card_names(root: Path = Path("/")) -> tuple[str, ...]:
    """Such as NVIDIA H200, one for each card the driver has; none where there is no driver."""
    told = [_read(path) for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))]
    return tuple(found.group(1).strip() for text in told if (found := re.search(r"^Model:\s*(.+)$", text, re.M)))


def nvidia_driver_version(root: Path = Path("/")) -> str | None:
    """Such as 580.95.05; None where there is no driver, or it says something else."""
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", _read(root / "proc/driver/nvidia/version"))
    return found.group(1) if found else None


# ---------------------------------------------------------------------------------------------------------------------
# Linux says all of it in files; elsewhere we know less and say so


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
    """Our control group and those around it, innermost first; each may set a limit, and the smallest one holds."""
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
    """Bytes in all and bytes free, as the tightest limit leaves them."""
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
    """Every limit with what counts against it now, less the file cache the kernel gives back when asked."""
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
