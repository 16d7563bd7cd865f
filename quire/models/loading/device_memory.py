"""Measures a device's available memory, for the loader before it allocates weights and for the memory plan."""

from __future__ import annotations

import os

import torch

from quire.machine import read_machine


def available_memory(device: torch.device) -> int:
    """Returns the bytes that can still be allocated on the device, within the container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    available = read_machine().memory_available
    return available if available is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
