"""Which tool-call format a model speaks, read off its chat template, so that nobody needs a flag for it."""

from __future__ import annotations

from quire.text.channels.formats import FORMATS


def choose_format(template_source: str) -> str | None:
    """The name of the format a chat template teaches, or None where it teaches none that we know. `json` is never
    chosen: it is what to fall back to when a model without a format is given tools all the same."""
    for name, found in FORMATS.items():
        if found.matches(template_source):
            return name
    return None
