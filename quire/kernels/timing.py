"""Times kernels on a device, for decisions between two implementations of an op.

`libraries.choose` compares attention libraries with it, `validation.gated_trial` the fused gate/up projection.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

ROUNDS = 3
LAUNCHES = 8

Timer = Callable[[Callable[[], object]], float]  # a launch -> its seconds on the device


def device_seconds(launch: Callable[[], object]) -> float:
    """Device time of one launch, measured over several so that host time does not count; the best of a few rounds."""
    launch()  # compiles and warms up
    best = float("inf")
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(LAUNCHES):
            launch()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3 / LAUNCHES)
    return best
