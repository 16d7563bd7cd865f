"""Chooses a model's tool-call format from its chat template, so that no flag is needed."""

from __future__ import annotations

from quire.text.channels.formats import FORMATS


def choose_format(template_source: str) -> str | None:
    """The name of the format that a chat template teaches, or None if it teaches no known one. Never returns `json`,
    which is the caller's fallback for models without a format."""
    for name, found in FORMATS.items():
        if found.matches(template_source):
            return name
    return None
