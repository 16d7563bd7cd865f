"""Which adapters the engine knows, and which of them are in the device's slots.

The scheduler gives a request's adapter a slot together with its row, and takes it back with the row. An adapter is
named by the digest of its content. One that no running request uses stays in its slot until another one needs it; the
least recently used one goes first.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.types import AdapterLoad, Plan, QuireError, Request


class AdapterSlots:
    """The slots of one engine. Slot numbers are the device's; -1 is the base model."""

    def __init__(self, num_slots: int = 0, known: Iterable[str] = ()):
        self.num_slots = num_slots
        self.known = set(known)  # digests of adapters whose weights the engine has
        self._slots: dict[str, int] = {}  # digest -> slot, least recently used first
        self._users: dict[str, int] = {}  # digest -> number of rows that use it
        self._free = list(range(num_slots - 1, -1, -1))
        self._again: list[AdapterLoad] = []  # loads of steps that failed, for the next plan

    def check_known(self, adapter: str | None) -> None:
        """Raise for a request whose adapter the engine does not have."""
        if adapter is not None and adapter not in self.known:
            what = f"The engine has no adapter with the digest {adapter[:16]}."
            raise QuireError("unknown_adapter", what, "Load it before it is used.", "model")

    def has_room(self, adapter: str | None) -> bool:
        """Whether a request with this adapter can start now."""
        return adapter is None or adapter in self._slots or bool(self._free) or self._victim() is not None

    def take(self, adapter: str | None, plan: Plan) -> int:
        """Return the slot of a request that starts, and add the load of its adapter to the plan if it is in none. Only
        after `has_room`."""
        if adapter is None:
            return -1
        slot = self._slots.pop(adapter, None)
        if slot is None:
            victim = None if self._free else self._victim()
            slot = self._free.pop() if victim is None else self._slots.pop(victim)
            plan.adapters.append(AdapterLoad(slot, adapter))
        self._slots[adapter] = slot
        self._users[adapter] = self._users.get(adapter, 0) + 1
        return slot

    def release(self, adapter: str | None) -> bool:
        """End a row's use of its adapter. True if the slot may now be given to another one."""
        if adapter is None:
            return False
        self._users[adapter] -= 1
        if self._users[adapter]:
            return False
        del self._users[adapter]
        self._slots[adapter] = self._slots.pop(adapter)  # the most recently used
        return True

    def finish(self, plan: Plan) -> None:
        """Add the loads of failed steps to the plan, unless their slots hold other adapters since."""
        again, self._again = self._again, []
        taken = {load.slot for load in plan.adapters}
        plan.adapters[:0] = [
            load for load in again if load.slot not in taken and self._slots.get(load.adapter) == load.slot
        ]

    def load_again(self, loads: Iterable[AdapterLoad]) -> None:
        """Repeat loads of a step that failed, which the device may not have done."""
        self._again += loads

    def is_used(self, adapter: str) -> bool:
        """Whether a row uses the adapter."""
        return adapter in self._users

    def forget(self, adapter: str) -> None:
        """Remove an adapter that no request uses."""
        assert adapter not in self._users, "an adapter in use is not removed"
        self.known.discard(adapter)
        slot = self._slots.pop(adapter, None)
        if slot is not None:
            self._free.append(slot)

    def empty_copy(self) -> AdapterSlots:
        """Return slots that know the same adapters and hold none."""
        return AdapterSlots(self.num_slots, self.known)

    def _victim(self) -> str | None:
        return next((adapter for adapter in self._slots if adapter not in self._users), None)

    @property
    def resident(self) -> list[str]:
        """The digests of the adapters in slots, least recently used first."""
        return list(self._slots)

    def check(self, running: Iterable[Request]) -> None:
        """Check that every slot is free or holds one known adapter, and that the users are the running requests."""
        held = list(self._slots.values())
        assert sorted([*held, *self._free]) == list(range(self.num_slots)), "a slot is lost or in two places"
        assert set(self._slots) <= self.known, "a slot holds an adapter that the engine does not have"
        users: dict[str, int] = {}
        for request in running:
            if request.adapter is not None:
                users[request.adapter] = users.get(request.adapter, 0) + 1
        assert users == self._users, f"rows use {users}, counted are {self._users}"
        assert set(self._users) <= set(self._slots), "an adapter in use is in no slot"
