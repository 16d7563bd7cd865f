"""Makes the drafter of the setting `speculate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from quire.engine.speculation.device import DeviceProposer
from quire.engine.speculation.forced import ForcedProposer
from quire.engine.speculation.goodput import GoodputDrafter
from quire.engine.speculation.history_file import HistoryFile
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
HEAD = "mtp"  # the checkpoint's own layers for several tokens
MODEL = "draft:"  # followed by the draft model


@dataclass(frozen=True, slots=True)
class SpeculateSetting:
    """The setting `speculate`, divided into its parts."""

    proposers: tuple[str, ...]  # names of the proposers that run on the host
    draft_model: str | None = None
    head: bool = False  # the checkpoint must have layers for several tokens
    head_if_any: bool = False  # such layers are used if the checkpoint has them

    @property
    def is_off(self) -> bool:
        return self == SpeculateSetting(())


def parse_speculate(speculate: str) -> SpeculateSetting:
    """Return the parts of a setting such as "auto" or "suffix,mtp". Raises for an unknown name."""
    names = [name.strip() for name in speculate.split(",")]
    if names == ["off"]:
        return SpeculateSetting(())
    if names == ["auto"]:
        return SpeculateSetting(("prediction", *AUTO), head_if_any=True)
    models = [name.removeprefix(MODEL) for name in names if name.startswith(MODEL)]
    hosts = [name for name in names if not name.startswith(MODEL) and name != HEAD]
    unknown = next((name for name in hosts if name not in PROPOSERS), None)
    if unknown is not None or "" in models:
        what = f"speculate={speculate!r}: there is no proposer {unknown!r}."
        if unknown is None:
            what = f"speculate={speculate!r} names no draft model."
        hint = f"Use auto, off, or some of {', '.join([*PROPOSERS, HEAD])}, {MODEL}MODEL."
        raise QuireError("invalid_parameter", what, hint, "speculate")
    if len(models) + (HEAD in names) > 1:
        what = f"speculate={speculate!r} names several draft networks."
        raise QuireError("invalid_parameter", what, f"Use {HEAD}, or one {MODEL}MODEL.", "speculate")
    return SpeculateSetting(("prediction", *hosts), models[0] if models else None, HEAD in names)


def make_drafter(
    speculate: str,
    network: str | None = None,
    verify: str = "exact",
    *,
    replays: bool = False,
    file: HistoryFile | None = None,
) -> Drafter | None:
    """Return the drafter of a setting; None for "off". `network`: the name of the device's draft network, if any.
    `verify`: how drafts are verified. `replays`: the model has recurrent state, see `GoodputDrafter`.
    `file`: where outputs of earlier requests are kept when the engine is closed.

    Predictions of requests are used with every setting but "off", because a client sends one for that purpose.
    """
    setting = parse_speculate(speculate)
    if setting.is_off:
        return None
    device = DeviceProposer(network, by_position=verify == "rejection") if network is not None else None
    suffix = SuffixProposer(file=file) if "suffix" in setting.proposers else None
    hosts = [
        suffix if suffix is not None and name == suffix.name else PROPOSERS[name]()
        for name in PROPOSERS
        if name in setting.proposers
    ]
    save = suffix.save if suffix is not None else lambda: None
    return GoodputDrafter(hosts, device=device, replays=replays, save=save)
