"""The minimum pace of a request body. The gate waits for each piece no longer than it allows."""

from __future__ import annotations

from dataclasses import dataclass

IDLE_SECONDS = 60.0  # longest pause between two bytes
GRACE_SECONDS = 20.0  # time before the rate applies


@dataclass(frozen=True, slots=True)
class BodyPace:
    """The limits on how long a body may take."""

    seconds: float  # limit for the whole body
    rate: int  # minimum average bytes per second after GRACE_SECONDS; 0: no minimum

    def deadline(self, started: float, now: float, num_bytes: int) -> float:
        """The time by which the next piece must arrive, after `num_bytes` since `started`."""
        latest = min(now + IDLE_SECONDS, started + self.seconds)
        return min(latest, started + GRACE_SECONDS + num_bytes / self.rate) if self.rate else latest
