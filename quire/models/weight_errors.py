"""The error of a checkpoint whose tensors do not fit its config, for all readers of weights."""

from __future__ import annotations

from quire.types import QuireError


def bad_weights(what: str) -> QuireError:
    return QuireError("bad_weights", f"{what}.", "The weights do not belong to this config; fetch both again.")
