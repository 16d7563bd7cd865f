"""The seam between deciding and computing: what the engine's loop asks of whoever runs the steps.

`runtime` implements it for one device in this process; a test device that finishes late and a group of ranks behind a
wire implement the same three methods. Steps run in the order they were given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from quire.types import Plan, QuireError, StepOutput


class Ticket(Protocol):
    def wait(self) -> StepOutput:
        """Block until the step's tokens are on the host. The only place where the host waits."""
        ...


class Workers(Protocol):
    def forward(self, plan: Plan) -> Any:
        """Start the forward pass of a step; returns at once where the device allows it."""
        ...

    def sample(self, forward: Any, masks: Mapping[int, bytes] | None = None) -> Ticket:
        """Sample from that forward. `masks`: plan index -> one bit per token id, set where the token is allowed."""
        ...

    def chores(self) -> Iterator[None]:
        """What would otherwise be done when it is first needed, the likeliest first: compile this, capture that. Each
        `next` does one, and only while no step is in flight."""
        ...

    def close(self) -> None: ...


class DeviceLost(QuireError):
    """The device is in a state no retry can mend; the process must be replaced."""

    def __init__(self, what: str):
        super().__init__(
            "device_lost", f"{what.rstrip('.')}.", "Start the engine again; `quire doctor` looks at the GPU."
        )
