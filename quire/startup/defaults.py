"""Defaults that depend on the machine: the device, and the rows, batch tokens, depth and page size for it."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from quire.config import Config
from quire.engine.limits import SchedulerLimits
from quire.machine import has_nvidia_driver
from quire.runtime.guard import first_line
from quire.types import QuireError

# A CPU computes inline, so depth 2 would only add latency. A prefill of a full token budget would delay decodes by half
# a second on the smallest model, and by many seconds on others.
CPU_DEFAULTS = {"max_rows": 32, "max_batch_tokens": 512, "depth": 1, "step_target_ms": 250, "page_tokens": 16}
# A page of 64 tokens is one copy of the prefill kernel, and few enough pages for the host to manage.
CUDA_DEFAULTS = {"max_rows": 256, "max_batch_tokens": 8192, "depth": 2, "step_target_ms": 0, "page_tokens": 64}


def pick_device(name: str, *, strict: bool = False) -> torch.device:
    """Returns the device to run on; "auto" is the first of CUDA, MPS and CPU that is usable. If an NVIDIA GPU exists
    but is unusable, warns and returns another device; `strict`: raises."""
    if name == "cpu":
        return torch.device("cpu")
    if name == "mps":
        if (trouble := mps_trouble()) is not None:
            raise QuireError("no_device", f"No MPS device is usable: {trouble}.", "Use --device cpu.")
        return torch.device("mps")
    trouble = cuda_trouble()
    if trouble is None:
        return _numbered_gpu(int(name.partition(":")[2] or 0))
    if name.startswith("cuda") or (strict and has_nvidia_driver()):
        what = f"No CUDA device is usable: {trouble}."
        raise QuireError("no_device", what, "Use --device cpu, or see `quire doctor`.")
    if has_nvidia_driver():
        warnings.warn(f"The GPU is unusable ({trouble}); running on the CPU instead.", stacklevel=2)
    elif mps_trouble() is None:
        return torch.device("mps")
    return torch.device("cpu")


def _numbered_gpu(index: int) -> torch.device:
    count = torch.cuda.device_count() if index else 1
    if index >= count:
        what = (
            f"There is no device cuda:{index}: this machine has {count} usable GPU{'s' * (count != 1)}, from cuda:0 on."
        )
        raise QuireError("no_device", what, "Choose another number, or see `quire doctor`.")
    return torch.device("cuda", index)


def mps_trouble() -> str | None:
    """Returns a short reason why torch can't use Apple's GPU; None if it can, after a trial of what a step needs."""
    if not torch.backends.mps.is_built():
        return "this torch was built without MPS"
    if not torch.backends.mps.is_available():
        return "there is no Apple GPU, or macOS is too old"
    try:
        if torch.equal(_mps_trial("mps"), _mps_trial("cpu")):
            return None
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return first_line(error)
    return "it computes wrong results"


def _mps_trial(device: str) -> torch.Tensor:
    """Whole numbers through a product, a write to the cache, attention's softmax over one key, and a choice."""
    x = torch.arange(64.0).view(8, 8).to(device)
    cache = torch.zeros(16, 8, device=device).index_copy_(0, torch.arange(8).to(device), x @ x)
    seen = torch.nn.functional.scaled_dot_product_attention(
        x[None, None, :1], x[None, None, :1], cache[None, None, 5:6]
    )
    return torch.cat((cache.cpu().flatten(), seen.cpu().flatten(), cache.argmax(1).float().cpu()))


def cuda_trouble() -> str | None:
    """Returns a short reason why torch can't use a CUDA device; None if it can."""
    with warnings.catch_warnings(record=True) as caught:  # torch reports a driver that is too old only as a warning
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if usable:
        return None
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    return (
        first_line(caught[0].message).split(". ")[0]
        if caught and isinstance(caught[0].message, Warning)
        else "none found"
    )


def describe_gpu(device: torch.device) -> dict[str, Any] | None:
    """Returns the properties that identify a GPU and its CUDA version; None for a CPU."""
    if device.type != "cuda":
        return None
    card = torch.cuda.get_device_properties(device)
    names = ("name", "uuid", "major", "minor", "multi_processor_count", "total_memory")
    return {name: str(getattr(card, name, "")) for name in names} | {"cuda": torch.version.cuda}


def resolve_page_tokens(config: Config, device: torch.device) -> int:
    """Returns the configured page size, or the default of the device."""
    return config.cache.page_tokens or _defaults(device)["page_tokens"]


def resolve_limits(config: Config, device: torch.device) -> SchedulerLimits:
    """Returns the scheduler's limits: the configured ones, and the device's defaults for the rest."""
    chosen = _defaults(device)
    scheduler = config.scheduler
    max_rows = scheduler.max_rows or chosen["max_rows"]
    max_batch_tokens = scheduler.max_batch_tokens or max(chosen["max_batch_tokens"], max_rows)
    if max_batch_tokens < max_rows:
        what = (
            f"max_batch_tokens={max_batch_tokens} is less than max_rows={max_rows}: a step could not decode every row."
        )
        raise QuireError("invalid_parameter", what, "Raise max_batch_tokens or lower max_rows.", "max_batch_tokens")
    target = chosen["step_target_ms"] if scheduler.step_target_ms is None else scheduler.step_target_ms
    pipelined = config.parallel.pp + 1 if config.parallel.pp > 1 else chosen["depth"]
    depth = config.engine.depth or pipelined
    return SchedulerLimits(
        max_rows=max_rows,
        max_batch_tokens=max_batch_tokens,
        chunk_tokens=min(scheduler.chunk_tokens or max_batch_tokens, max_batch_tokens),
        max_waiting=scheduler.max_waiting,
        max_waiting_tokens=scheduler.max_waiting_tokens,
        preemption=scheduler.preemption,
        order=scheduler.order,
        prefix_wait=scheduler.prefix_wait if scheduler.admit == "prefix" else None,
        step_target_seconds=target / 1000 if target else None,
        depth=depth,
        stages=max(1, min(config.parallel.pp, depth - 1)),
    )


def _defaults(device: torch.device) -> dict[str, int]:
    return CUDA_DEFAULTS if device.type == "cuda" else CPU_DEFAULTS
