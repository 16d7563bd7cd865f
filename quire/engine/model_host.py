"""The protocol between the engine and the owner of its model: change the weights, change the precision, release them.

Every change is one act: hold the engine until no step is in flight, build the new weights aside, prove them, replace
the model, and name a new version of the weights, so that no prefix of the old one is found again. `Controls` runs the
generators here between turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol

from quire.engine.control import Controls, Steps
from quire.engine.loop import Engine
from quire.types import QuireError

IN_FLIGHT = ("keep", "recompute", "end")


class Candidate(Protocol):
    """Weights that are loaded and proven, and not used yet."""

    @property
    def version(self) -> bytes:
        """A digest of the files and settings."""
        ...

    @property
    def checks(self) -> Mapping[str, float]:
        """What their proof measured."""
        ...


class ModelHost(Protocol):
    """The model of one engine. `build` runs on any thread while no step is in flight; the rest on the engine's."""

    def build(self, model: str | None, quant: str | None, max_loss: float) -> Candidate:
        """Load weights from `model` (None: where the present ones came from), quantized to `quant` (None: as they are),
        and prove them. Raises if they do not fit in place of the present ones or lose too much."""
        ...

    def use(self, candidate: Candidate) -> None: ...

    def drop(self, *, cache: bool) -> None:
        """Give the memory of the weights back, and that of the cache if asked."""
        ...


class ModelControl:
    """The commands "weights", "precision", "sleep" and "wake" of one engine."""

    def __init__(self, engine: Engine, host: ModelHost):
        self._engine = engine
        self._host = host
        self._controls: Controls = engine.controls
        self._is_changing = False
        self.is_asleep = False
        for name, run in (
            ("weights", self._weights),
            ("precision", self._precision),
            ("sleep", self._sleep),
            ("wake", self._wake),
        ):
            self._controls.add(name, run)

    def _weights(self, fields: Mapping[str, Any]) -> Steps[dict[str, Any]]:
        how = str(fields.get("in_flight", "keep"))
        if how not in IN_FLIGHT:
            what = f"in_flight={how!r} is not known."
            raise QuireError("invalid_parameter", what, f"Choose one of {', '.join(IN_FLIGHT)}.", "in_flight")
        model = str(fields["model"])
        return (yield from self._replace(lambda: self._host.build(model, None, float("inf")), how))

    def _precision(self, fields: Mapping[str, Any]) -> Steps[dict[str, Any]]:
        quant, loss = str(fields["weights"]), float(fields.get("max_loss") or 0.5)
        return (yield from self._replace(lambda: self._host.build(None, quant, loss), "keep"))

    def _sleep(self, fields: Mapping[str, Any]) -> Steps[dict[str, Any]]:
        drops = fields.get("cache", "keep") == "drop"
        if self.is_asleep:
            return {"asleep": True}
        yield from self._hold()
        try:
            self._host.drop(cache=drops)
            if drops:
                self._engine.scheduler.use_weights(_mark(), "recompute")
            self.is_asleep = True  # the engine stays held; requests wait
        finally:
            self._is_changing, self._engine.is_held = False, self.is_asleep
        return {"asleep": True}

    def _wake(self, fields: Mapping[str, Any]) -> Steps[dict[str, Any]]:
        started = time.monotonic()
        if self.is_asleep:
            self._begin()
            try:
                self._host.use((yield from self._controls.aside(lambda: self._host.build(None, None, float("inf")))))
                self.is_asleep = self._engine.is_held = False
            finally:
                self._is_changing = False
        return {"asleep": False, "seconds": time.monotonic() - started}

    def _begin(self) -> None:
        if self._is_changing:
            raise QuireError("busy", "The weights are being changed already.", "Wait until that has ended.")
        self._is_changing = True

    def _hold(self) -> Generator[None, None, None]:
        """Wait until no step is in flight. None is planned from now on."""
        self._begin()
        self._engine.is_held = True
        while self._engine.num_inflight:
            yield

    def _replace(self, build: Callable[[], Candidate], in_flight: str) -> Steps[dict[str, Any]]:
        if self.is_asleep:
            raise QuireError("asleep", "The model sleeps.", "Wake it first (POST /admin/wake).")
        started = time.monotonic()
        yield from self._hold()
        try:
            built = yield from self._controls.aside(build)
            self._host.use(built)
            self._engine.scheduler.use_weights(built.version, in_flight)
        finally:
            self._is_changing = self._engine.is_held = False
        checks = {name: round(value, 6) for name, value in built.checks.items()}
        return {"version": built.version.hex(), "paused_seconds": round(time.monotonic() - started, 6), **checks}


def _mark() -> bytes:
    """Returns a version that no weights have."""
    return time.monotonic_ns().to_bytes(16, "little")
