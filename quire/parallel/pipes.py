"""`Pipe`: what the stages of a pipeline send each other. Activations go to the next stage, tokens back to the others.

`in_memory` implements it for ranks that are threads, `socket_pipes` for ranks that are processes.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire.types import QuireError


class Pipe(Protocol):
    """One stage's connections to the other stages. Messages between two stages come in the order they were sent."""

    @property
    def stage(self) -> int: ...

    @property
    def count(self) -> int:
        """Number of stages."""

    def send(self, x: Tensor, to: int) -> None:
        """Sends a tensor to another stage, without waiting for it to be received."""

    def receive(self, source: int) -> Tensor:
        """Returns the next tensor of another stage. Raises `PipeTimeout` past the deadline."""


class PipeTimeout(QuireError):
    """A stage that did not send in time, or has ended."""

    def __init__(self, source: int, what: str):
        super().__init__(
            "rank_timeout", f"Stage {source} {what}.", "The group of ranks is rebuilt; look at that rank's log."
        )
        self.source = source
