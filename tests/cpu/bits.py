"""Engines whose logits are noted down, to be compared bit by bit: for the tests of the deterministic mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from quire.engine.loop import Engine
from quire.models.model import Model
from quire.types import Plan, Request
from tests.cpu.rig import make_engine

Logits = dict[tuple[str, int], Tensor]  # (request, length) -> its logits there


class Spy:
    """Workers that note the logits every sample is drawn from; a graph that samples may have none to show."""

    def __init__(self, inner: Any, seen: Logits):
        self._inner, self._seen = inner, seen

    def forward(self, plan: Plan) -> Any:
        return self._inner.forward(plan)

    def sample(self, forward: Any, masks: Mapping[int, bytes] | None = None) -> Any:
        rows = [row for row in forward.plan.rows if row.wants_sample]
        for index, row in enumerate(rows if forward.logits is not None else ()):
            self._seen[row.request_id, row.start + row.count] = forward.logits[index].clone()
        return self._inner.sample(forward, masks)

    def warm_ups(self) -> Iterator[None]:
        return self._inner.warm_ups()

    def close(self) -> None: ...


def spied(model: Model, **knobs: Any) -> tuple[Engine, Logits]:
    seen: Logits = {}
    engine = make_engine(model, **knobs)
    engine.wrap(lambda workers: Spy(workers, seen))
    return engine, seen


def run(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    for place, request in enumerate(requests):
        request.arrival = float(place)
        engine.add(request)
    assert [delta.error for delta in engine.run_until_idle() if delta.error] == []
    return {request.id: request.tokens[request.prompt_len :] for request in requests}


def same(one: Logits, other: Logits, what: str = "") -> None:
    assert one.keys() == other.keys()
    for place, logits in one.items():
        assert torch.equal(as_bits(logits), as_bits(other[place])), f"{what}: {place}"


def as_bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32 if x.element_size() == 4 else torch.int16)
