"""The `Communicator` protocol: the ranks of one group and the reductions between them. Layers get one from their
`Build`.

An implementation is a file. `Alone`, the group of one rank, is the one of an engine on a single device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Communicator(Protocol):
    """The ranks that compute one model together, as one of them sees the group."""

    @property
    def rank(self) -> int:
        """This rank's index in the group."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' tensors, which have the shape of x. May write it to the memory of x."""


@dataclass(frozen=True, slots=True)
class Alone:
    """The group of one rank."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns x: the sum over one rank."""
        return x


ALONE = Alone()
