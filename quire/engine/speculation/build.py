"""Makes the drafter of the setting `speculate`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from quire.engine.speculation.forced import ForcedProposer
from quire.engine.speculation.goodput import GoodputDrafter
from quire.engine.speculation.ngram import NgramProposer
from quire.engine.speculation.prediction import PredictionProposer
from quire.engine.speculation.seam import Drafter, Proposer
from quire.engine.speculation.suffix import SuffixProposer
from quire.types import QuireError

PROPOSERS: dict[str, Callable[[], Proposer]] = {
    "grammar": ForcedProposer,
    "prediction": PredictionProposer,
    "suffix": SuffixProposer,
    "prompt": partial(SuffixProposer, "prompt", earlier_requests=False, own_output=False),
    "ngram": NgramProposer,
}
AUTO = ("grammar", "suffix")  # suffix matching finds what n-grams find, and more


def make_drafter(speculate: str) -> Drafter | None:
    """Return the drafter of a setting such as "auto" or "ngram,suffix"; None for "off". Raises for an unknown name.

    Predictions of requests are used with every setting but "off", because a client sends one for that purpose.
    """
    names = [name.strip() for name in speculate.split(",")]
    if names == ["off"]:
        return None
    if names == ["auto"]:
        names = list(AUTO)
    unknown = next((name for name in names if name not in PROPOSERS), None)
    if unknown is not None:
        what = f"speculate={speculate!r}: there is no proposer {unknown!r}."
        raise QuireError("invalid_parameter", what, f"Use auto, off, or some of {', '.join(PROPOSERS)}.", "speculate")
    return GoodputDrafter([PROPOSERS[name]() for name in PROPOSERS if name in {"prediction", *names}])
