"""The `Communicator` protocol: the ranks of one group and what they exchange. Layers get one from their `Build`.

Each implementation is a file: `in_memory` for ranks that are threads of one process, `shared_memory` for ranks that
are processes of one machine. `Alone`, the group of one rank, is the one of an engine on a single device.

All ranks of a group call the same operations in the same order. An operation that not all ranks join within the group's
deadline raises `RankTimeout`, which names the ranks that are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quire.kernels.native.hooks import Hook
from quire.types import QuireError


class Communicator(Protocol):
    """The ranks that compute one model together, as one of them sees the group."""

    @property
    def rank(self) -> int:
        """This rank's index in the group."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' tensors, which have the shape of x. May write it to the memory of x.

        The sum is taken in the order of the ranks, so that all ranks get the same bits.
        """

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Returns all ranks' tensors side by side along the last dimension, in the order of the ranks.

        x [..., sizes[rank]] -> [..., sum(sizes)]
        """

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Sends the rows of x in turn to the ranks, `sent[r]` of them to rank r, and returns the rows from all ranks in
        their order, `received[r]` of them from rank r.

        x [sum(sent), ...] -> [sum(received), ...]
        """

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Returns rank `source`'s x on every rank. x has the same shape and dtype on all ranks; may be overwritten."""

    def reduction(self) -> Hook | None:
        """Returns the hook with which the native library's stack sums over the ranks; None: it can't."""


class RankTimeout(QuireError):
    """An operation of a group of ranks that did not finish in time."""

    def __init__(self, missing: Sequence[int], operation: str, number: int, seconds: float):
        ranks = ", ".join(map(str, missing)) or "unknown"
        what = f"Rank {ranks} did not join {operation} number {number} within {seconds:g} s."
        super().__init__("rank_timeout", what, "The group of ranks is rebuilt; look at that rank's log.")
        self.missing = tuple(missing)


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

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        return x

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return x

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return x

    def reduction(self) -> Hook | None:
        return None


ALONE = Alone()
