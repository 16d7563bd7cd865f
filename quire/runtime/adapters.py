"""The adapters of one device: those whose weights are in host memory, those in slots, and what each row uses.

The runner executes a plan's adapter loads here and asks for the route of each step. Loading a file may happen on any
thread; everything else on the engine's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from quire.files.adapters import AdapterFiles
from quire.layers.adapters import Adapter, AdapterPool, LowRank, Replaced, Route
from quire.models.adapters.load import load_adapter
from quire.models.adapters.places import Places
from quire.models.model import Model
from quire.runtime.rows import list_step
from quire.types import AdapterLoad, Plan, QuireError


class DeviceAdapters:
    """Adapters by digest, their slots, and the slot of each row."""

    def __init__(
        self,
        model: Model,
        places: Places,
        num_slots: int,
        num_rows: int,
        device: torch.device,
        dtype: torch.dtype,
        max_rank: int,
    ):
        self.pool = AdapterPool([None] * num_slots, [None] * num_slots)
        self._model: Model | None = model
        self._places = places
        self._device = device
        self._dtype = dtype
        self._max_rank = max_rank
        self._host: dict[str, tuple[Adapter, Any]] = {}  # with its packed form
        self._row_slots = np.full(num_rows + 1, -1, np.int64)
        self._lock = threading.Lock()
        self._is_attached = False

    # -- host ---------------------------------------------------------------------------------------------------------

    def load(self, files: AdapterFiles) -> Adapter:
        """Reads an adapter into host memory. Raises for one that does not fit the model; nothing changes then."""
        with self._lock:
            known = self._host.get(files.digest)
        if known is not None:
            return known[0]
        adapter = load_adapter(files, self._places, dtype=self._dtype, max_rank=self._max_rank)
        if not self._is_attached:  # weights look for adapters only once there is one
            self._places.attach(self.pool)
            self._is_attached = True
        packed = None if self._model is None else self._model.pack_adapter(adapter)
        with self._lock:
            return self._host.setdefault(files.digest, (adapter, packed))[0]

    def forget(self, digest: str) -> None:
        """Drops an adapter that no request uses. Its slot keeps it until another one takes its place."""
        with self._lock:
            self._host.pop(digest, None)

    def shapes(self) -> Mapping[str, tuple[int, int]]:
        return self._places.shapes()

    def leave_model(self) -> None:
        """Lets go of the model whose memory is to be freed."""
        self._places.release()
        self._model = None

    def move_to(self, model: Model, places: Places) -> None:
        """Serves the same adapters beside another model of the same layout."""
        self._model, self._places = model, places
        if self._is_attached:
            places.attach(self.pool)
        with self._lock:
            self._host = {digest: (one, model.pack_adapter(one)) for digest, (one, _) in self._host.items()}
        for slot, adapter in enumerate(self.pool.slots):
            if adapter is not None and adapter.digest in self._host:
                self.pool.put(slot, adapter, self._host[adapter.digest][1])

    # -- device -------------------------------------------------------------------------------------------------------

    def apply(self, plan: Plan) -> None:
        """Executes the plan's loads, and notes the slots of its new rows."""
        for row in plan.freed:
            self._row_slots[row] = -1
        for load in plan.adapters:
            self._put(load)
        for init in plan.added:
            self._row_slots[init.row] = init.adapter

    def _put(self, load: AdapterLoad) -> None:
        with self._lock:
            found = self._host.get(load.adapter)
        if found is None:
            what = f"The adapter {load.adapter[:16]} is not in memory."
            raise QuireError("unknown_adapter", what, "Load it again.")
        adapter, packed = found
        self.pool.put(load.slot, _moved(adapter, self._device), packed)

    def route(self, plan: Plan) -> Route | None:
        """Returns which tokens of the step use which slot; None: all use the base model."""
        slots = self._row_slots[[row.row for row in plan.rows]]
        if not (slots >= 0).any():
            return None
        tokens = np.repeat(slots, [row.count for row in plan.rows])
        return Route(tokens, tokens[list_step(plan)["logits_index"]], self._device)

    @contextmanager
    def routed(self, route: Route) -> Iterator[None]:
        """Within it, layers add the updates of this route."""
        before, self.pool.route = self.pool.route, route
        try:
            yield
        finally:
            self.pool.route = before

    @property
    def active(self) -> AdapterPool | None:
        """The pool, while a step with adapters runs."""
        return self.pool if self.pool.route is not None else None

    def route_of_row(self, row: int) -> Route:
        """Returns the route of tokens that are all of one row."""
        return Route.of_one(int(self._row_slots[row]), self._device)


def _moved(adapter: Adapter, device: torch.device) -> Adapter:
    """Returns the adapter with its tensors on the device."""
    if device.type == "cpu":
        return adapter

    def move(update: LowRank | Replaced) -> LowRank | Replaced:
        if isinstance(update, Replaced):
            return replace(update, weight=update.weight.to(device, non_blocking=True))
        return replace(update, a=update.a.to(device, non_blocking=True), b=update.b.to(device, non_blocking=True))

    def move_all(updates: Sequence[LowRank | Replaced]) -> tuple[LowRank | Replaced, ...]:
        return tuple(map(move, updates))

    return replace(adapter, updates={number: move_all(updates) for number, updates in adapter.updates.items()})
