"""Audits: steps that take the opposite choice, and the record of what speculation gains.

Drafts are chosen by measured times of steps with and without them, so both kinds have to be measured for as long as the
engine runs. The time that audits are expected to lose is bounded by a share of all time.
"""

from __future__ import annotations

MIN_INTERVAL = 64  # minimum number of choices between two audits
MAX_SHARE = 0.005  # maximum share of the steps' time that audits may cost


class AuditBudget:
    """Decides when a step may take the opposite choice."""

    def __init__(self) -> None:
        self.num_audits = 0
        self._lost = 0.0  # expected seconds that audits have cost
        self._total = 0.0  # seconds of all steps
        self._num_choices = 0  # number of choices since the last audit

    @property
    def share(self) -> float:
        """Share of the time that audits have cost."""
        return self._lost / self._total if self._total else 0.0

    def observe(self, seconds: float) -> None:
        """Count the time of a step."""
        self._total += seconds

    def is_due(self) -> bool:
        """Count a choice. True if the next audit may come now, at a cost that `take` checks."""
        self._num_choices += 1
        return self._num_choices >= MIN_INTERVAL

    def take(self, loss: float) -> bool:
        """Return whether a step that is expected to lose `loss` seconds is within the budget, and count it if so."""
        if self._lost + loss > MAX_SHARE * self._total:
            return False
        self._lost += loss
        self._num_choices = 0
        self.num_audits += 1
        return True


class GainRecord:
    """How much time drafts have saved: steps with drafts against the expected time of their tokens without."""

    def __init__(self) -> None:
        self._seconds = 0.0  # total time of steps with drafts
        self._seconds_without = 0.0  # expected time of the same tokens in steps without drafts
        self._per_token = 0.0  # expected time per token of the last step with drafts, if it had none

    def step(self, seconds: float, without: float, num_rows: int) -> None:
        """Count a step with drafts; `without`: its expected time if it had none."""
        self._per_token = without / num_rows
        self._seconds += seconds
        self._seconds_without += without

    def accepted(self, num_tokens: int) -> None:
        """Count accepted drafts of the last step."""
        self._seconds_without += num_tokens * self._per_token

    @property
    def ratio(self) -> float:
        """Expected time without drafts over the time with drafts."""
        return self._seconds_without / self._seconds if self._seconds else 1.0
