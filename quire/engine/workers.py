"""The interface between the engine's loop and the workers that run steps.

`quire.runtime` implements it for one device in this process; tests implement it with a device that finishes late.
Steps run in the order of the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from quire.types import Plan, QuireError, StepOutput


class Ticket(Protocol):
    """A step in flight."""

    def wait(self) -> StepOutput:
        """Block until the step's tokens are on the host. The host waits for the device nowhere else."""
        ...


class Workers(Protocol):
    """The interface of a device, or a group of devices, that runs steps."""

    def forward(self, plan: Plan) -> Any:
        """Start the forward pass of a step, without waiting for it where the device is asynchronous."""
        ...

    def sample(self, forward: Any, masks: Mapping[int, bytes] | None = None) -> Ticket:
        """Sample from a forward pass, and accept the drafts that equal what is sampled in their places.

        `masks`: plan index -> one bit per token id, set where the token is allowed; with drafts one mask per position.
        """
        ...

    def warm_ups(self) -> Iterator[None]:
        """Yield after each piece of warm-up work (a kernel to compile, a CUDA graph to capture), most useful first.

        The caller must advance the iterator only while no step is in flight.
        """
        ...

    def close(self) -> None: ...


class DeviceLost(QuireError):
    """The device is in a state that no retry mends, so the process must be replaced."""

    def __init__(self, what: str):
        super().__init__(
            "device_lost", f"{what.rstrip('.')}.", "Start the engine again; `quire doctor` looks at the GPU."
        )


class RanksLost(DeviceLost):
    """Some ranks of a group have ended or do not answer. `regroup` replaces them; what the cache held is lost."""

    def __init__(self, what: str, regroup: Callable[[], None]):
        super().__init__(what)
        self.regroup = regroup
