"""Expert parallel: rows travel without padding, and every token gets the sum that one rank computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.layers.expert_exchange import ExpertExchange, ExpertPlaces
from quire.layers.split import share_out
from quire.parallel.in_memory import make_group

WIDTH, EXPERTS, TOP_K = 8, 6, 2


def on_ranks(size: int, work: Callable[[Any], Any]) -> list[Any]:
    """Returns what each rank's `work` returns."""
    results: list[Any] = [None] * size
    group = make_group(size, 60.0)

    def one(rank: int) -> None:
        results[rank] = work(group[rank])

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def one_rank(x: Tensor, chosen: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for place in range(TOP_K):
        total += torch.einsum("tw,two->to", x, matrices[chosen[:, place]]) * weights[:, place, None]
    return total


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 17])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_go_to_their_experts_and_no_others(size: int, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, WIDTH, generator=generator)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, TOP_K, generator=generator)
    matrices = torch.randn(EXPERTS, WIDTH, WIDTH, generator=generator)

    def work(communicator: Any) -> tuple[Tensor, int]:
        start, stop = share_out(EXPERTS, size)[communicator.rank]
        exchange = ExpertExchange(communicator, ExpertPlaces.in_order(EXPERTS, size))
        own = matrices[start:stop]

        def run(rows: Tensor, experts: Tensor) -> Tensor:
            assert int(experts.max()) < len(own)
            return torch.einsum("tw,two->to", rows, own[experts])

        return exchange.run(x, chosen, weights, run), exchange.sent_bytes

    found = on_ranks(size, work)
    for total, _ in found:
        assert torch.allclose(total, one_rank(x, chosen, weights, matrices), atol=1e-5)
        assert torch.equal(total, found[0][0]), "the same bits on every rank"
    rank_of = {e: r for r, (start, stop) in enumerate(share_out(EXPERTS, size)) for e in range(start, stop)}
    pairs = [
        (home, rank_of[int(expert)])
        for home, (first, last) in enumerate(share_out(num_tokens, size))
        for token in range(first, last)
        for expert in chosen[token]
    ]
    away = sum(home != owner for home, owner in pairs)
    assert sum(sent for _, sent in found) == 2 * away * WIDTH * 4, "each row once there and once back"


def test_a_map_may_put_any_expert_anywhere() -> None:
    """The places are data: here experts are dealt out in turn."""
    x, matrices = torch.randn(9, WIDTH), torch.randn(EXPERTS, WIDTH, WIDTH)
    chosen, weights = torch.randint(EXPERTS, (9, TOP_K)), torch.rand(9, TOP_K)
    places = ExpertPlaces(torch.arange(EXPERTS) % 2, torch.arange(EXPERTS) // 2)

    def work(communicator: Any) -> Tensor:
        own = matrices[communicator.rank :: 2]
        exchange = ExpertExchange(communicator, places)
        return exchange.run(x, chosen, weights, lambda rows, e: torch.einsum("tw,two->to", rows, own[e]))

    for total in on_ranks(2, work):
        assert torch.allclose(total, one_rank(x, chosen, weights, matrices), atol=1e-5)
