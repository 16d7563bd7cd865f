"""Makes the drafter of the setting `speculate`."""

from __future__ import annotations

from collections.abc import Callable

from quire.engine.speculation.forced import ForcedProposer
from quire.engine.speculation.ngram import NgramProposer
from quire.engine.speculation.seam import Drafter, Proposer
from quire.engine.speculation.stack import ProposerStack
from quire.types import QuireError

PROPOSERS: dict[str, Callable[[], Proposer]] = {"grammar": ForcedProposer, "ngram": NgramProposer}


def make_drafter(speculate: str) -> Drafter | None:
    """Return the drafter of a setting such as "ngram"; None for "off". Raises for an unknown proposer."""
    names = [name.strip() for name in speculate.split(",")]
    if names == ["off"]:
        return None
    unknown = next((name for name in names if name not in PROPOSERS), None)
    if unknown is not None:
        what = f"speculate={speculate!r}: there is no proposer {unknown!r}."
        raise QuireError("invalid_parameter", what, f"Use off, or some of {', '.join(PROPOSERS)}.", "speculate")
    return ProposerStack([PROPOSERS[name]() for name in dict.fromkeys(names)])
