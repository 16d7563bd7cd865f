"""The protocols of speculation: a source of guessed tokens, and the choice of the guesses that a step verifies.

The scheduler calls a `Drafter` while it plans and commits; a drafter calls `Proposer`s. See the package's docstring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.engine.costs.step_costs import StepCosts
from quire.engine.limits import SpeculationStats
from quire.types import Plan, Request
from quire.types.bounds import MAX_DRAFTS


@dataclass(slots=True)
class Draft:
    """Guesses of one request's next tokens, in order. An empty draft is no guess."""

    tokens: list[int] = field(default_factory=list)
    # survival[i]: probability that guesses 0 to i are all accepted, so it never rises. 1.0: certain (a grammar).
    survival: list[float] = field(default_factory=list)
    source: str = ""  # name of the proposer


NO_DRAFT = Draft()  # never changed


class Proposer(Protocol):
    """A source of drafts."""

    name: str

    def propose(self, requests: Sequence[Request], budget: int) -> list[Draft]:
        """Return one draft per request, each of at most `budget` tokens. Every token of the requests has committed."""
        ...

    def end(self, request: Request) -> None:
        """Forget a request that has ended."""
        ...


class Drafter(Protocol):
    """The choice of the drafts that a step verifies."""

    costs: StepCosts  # times of steps; the scheduler reports each step to it
    has_device: bool  # True: the device proposes drafts too, so `plan_proposals` is asked

    def draft(self, requests: Sequence[Request], num_tokens: int, budget: int) -> Mapping[str, list[int]]:
        """Return drafts by request id for the next step, at most `budget` tokens in all, none of them empty.

        `requests` decode, and all their tokens have committed. The step computes at least `num_tokens` tokens besides
        the drafts.
        """
        ...

    def waits(self, request: Request) -> bool:
        """True if a request with a token in flight shall be planned only once that token is known, to draft after it.

        Asked where steps overlap only. Such a request is in every second step.
        """
        ...

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Report how many of a request's drafts were accepted. Called once the step's tokens are in the request."""
        ...

    def plan_proposals(self, requests: Sequence[Request], num_tokens: int) -> Mapping[str, int]:
        """Return for which requests the device's draft network shall propose drafts after the step being planned, and
        how many. `requests` are those that sample in the step, `num_tokens` is how many tokens the step computes."""
        ...

    def is_proposed(self, request: Request) -> bool:
        """True if the request's drafts for the step being planned are from the device, and their number does not depend
        on which tokens they are."""
        ...

    def proposed(self, request: Request, drafts: list[int], chances: Sequence[float]) -> None:
        """Report drafts that the device has proposed, and the draft network's own probability of each. They follow the
        request's tokens."""
        ...

    def observe(self, plan: Plan, seconds: float, proposing: float = 0.0) -> None:
        """Report how long a step took, and how long the device proposed drafts after it."""
        ...

    def end(self, request: Request) -> None:
        """Forget a request that has ended."""
        ...

    def save(self) -> None:
        """Write what shall outlive the engine, if there is a place for it. Called when the engine is closed."""
        ...

    def stats(self) -> SpeculationStats:
        """Return the counters so far."""
        ...


def max_drafts(request: Request) -> int:
    """Return how many drafts can become output: the token sampled after the last one is the request's last."""
    if not request.params.speculate:
        return 0
    return min(request.max_len - len(request.tokens) - 1, MAX_DRAFTS)
