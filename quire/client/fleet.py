"""The fleet: the models that the HTTP process serves, and the engines (replicas) that run each of them.

The server submits, cancels and measures through it. It owns the replicas: each is one engine, seen through its client
and kept alive by its supervisor. `quire serve` makes a fleet of one model with one replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from quire.client.engine_client import EngineClient, LiveRequest
from quire.client.supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine of a model."""

    label: str  # names it in metrics
    client: EngineClient
    supervisor: Supervisor


class Fleet:
    """`models`: name -> its replicas, at least one. The first model answers requests that name none."""

    def __init__(self, models: Mapping[str, Sequence[Replica]]):
        assert models and all(models.values()), "a fleet has a model, and a model has a replica"
        self._models = {name: tuple(replicas) for name, replicas in models.items()}
        self.replicas = tuple(one for replicas in self._models.values() for one in replicas)
        assert len({one.label for one in self.replicas}) == len(self.replicas), "labels tell replicas apart"

    @property
    def lead(self) -> Replica:
        """The replica that describes the fleet where one description is shown: the first of the first model."""
        return self.replicas[0]

    def choose(self, model: str | None = None) -> Replica:
        """Return the replica for a new request: of those that have an engine, the one with the fewest live requests."""
        replicas = next(iter(self._models.values())) if model is None else self._models[model]
        return min(replicas, key=lambda one: (not one.client.is_attached, len(one.client.live)))

    def live(self) -> Iterator[tuple[str, LiveRequest]]:
        """Yield the id and the state of every request that has not ended."""
        for replica in self.replicas:
            yield from list(replica.client.live.items())

    @property
    def num_live(self) -> int:
        return sum(len(replica.client.live) for replica in self.replicas)

    def cancel_all(self) -> int:
        """Cancel every live request; return how many there were."""
        count = 0
        for replica in self.replicas:
            ids = list(replica.client.live)
            replica.client.cancel(ids)
            count += len(ids)
        return count

    async def start(self) -> None:
        """Start every engine. Raises the first error of an engine that can't start; the caller must still `stop`."""
        for replica in self.replicas:
            await replica.supervisor.start()

    async def stop(self, *, at_once: bool = False) -> None:
        for replica in self.replicas:
            await replica.supervisor.stop(at_once=at_once)
