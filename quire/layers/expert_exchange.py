"""Expert parallel: each rank has whole experts, and the rows of tokens travel to the ranks that have theirs.

A rank is the home of some of the step's tokens. It sends each of them to the ranks of its experts, without padding:
first how many rows go to each rank, then the rows. The outputs come back the same way, and the home adds a token's
experts in the order in which its router chose them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.layers.split import share_out
from quire.parallel import Communicator

# x [rows, width], experts [rows] int64 (index on this rank) -> their outputs [rows, width]
RunExperts = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ExpertPlaces:
    """Which rank has which expert. Data: another map may follow between steps, once its weights are where it says."""

    rank: Tensor  # [experts] int64
    index: Tensor  # [experts] int64: among those of its rank

    @classmethod
    def in_order(cls, num_experts: int, size: int) -> ExpertPlaces:
        """Returns the map in which every rank has neighbouring experts, as many as the others."""
        ranks = torch.empty(num_experts, dtype=torch.int64, device="cpu")
        indices = torch.empty(num_experts, dtype=torch.int64, device="cpu")
        for rank, (start, stop) in enumerate(share_out(num_experts, size)):
            ranks[start:stop] = rank
            indices[start:stop] = torch.arange(stop - start, device="cpu")
        return cls(ranks, indices)


class ExpertExchange:
    """The exchange of one mixture between the ranks of a group."""

    def __init__(self, communicator: Communicator, places: ExpertPlaces):
        self.communicator = communicator
        self.places = places
        self.sent_bytes = 0  # of rows to other ranks, outputs of experts included

    def run(self, x: Tensor, chosen: Tensor, weights: Tensor, run: RunExperts) -> Tensor:
        """Returns the weighted sums of all tokens' experts, on every rank, [tokens, width].

        x [tokens, width], chosen and weights [tokens, top_k]: equal on all ranks
        """
        rank, size = self.communicator.rank, self.communicator.size
        homes = share_out(len(x), size)
        start, stop = homes[rank]
        mine, shares = chosen[start:stop], weights[start:stop].to(x.dtype)
        num_tokens, top_k = mine.shape
        owners = self.places.rank[mine.flatten()]  # [tokens here * top_k]
        order = owners.argsort(stable=True)
        sent = owners.bincount(minlength=size).tolist()
        received = self._exchange_counts(sent)
        rows = x[start:stop][order // top_k]
        experts = self.places.index[mine.flatten()[order]]
        came = self._send(rows, sent, received)
        places = self.communicator.all_to_all(experts.unsqueeze(1), sent, received).squeeze(1)
        outputs = run(came, places) if len(came) else came
        back = self._send(outputs, received, sent)
        apart = torch.empty_like(back)
        apart[order] = back
        apart = apart.view(num_tokens, top_k, x.shape[1])
        total = torch.zeros(num_tokens, x.shape[1], dtype=x.dtype, device=x.device)
        for place in range(top_k):
            total += apart[:, place] * shares[:, place, None]
        width = x.shape[1]
        whole = self.communicator.all_gather(total.flatten(), [(last - first) * width for first, last in homes])
        return whole.view(len(x), width)

    def _exchange_counts(self, sent: list[int]) -> list[int]:
        counts = torch.tensor(sent, dtype=torch.int64, device="cpu").unsqueeze(1)
        ones = [1] * len(sent)
        found: list[int] = self.communicator.all_to_all(counts, ones, ones).flatten().tolist()
        return found

    def _send(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        away = sum(sent) - sent[self.communicator.rank]
        self.sent_bytes += away * rows.shape[1] * rows.element_size()
        return self.communicator.all_to_all(rows, sent, received)
