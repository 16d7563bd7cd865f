"""How slowly a body may arrive: the gate waits for each piece no longer than this allows."""

from __future__ import annotations

from dataclasses import dataclass

IDLE_SECONDS = 60.0  # without a byte
GRACE_SECONDS = 20.0  # before the rate counts


@dataclass(frozen=True, slots=True)
class BodyPace:
    seconds: float  # for the whole body
    rate: int  # bytes a second on average, once GRACE_SECONDS are over; 0: any

    def deadline(self, started: float, now: float, num_bytes: int) -> float:
        """When the next piece must be there, if `num_bytes` have arrived since `started`."""
        latest = min(now + IDLE_SECONDS, started + self.seconds)
        return min(latest, started + GRACE_SECONDS + num_bytes / self.rate) if self.rate else latest
