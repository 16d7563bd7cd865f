"""Loads a model's tokenizer and chat template from its files, for the engine's assembly and the HTTP process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from quire.files.source import ModelFiles
from quire.text.template import ChatTemplate, template_for
from quire.text.tokenizer import Tokenizer
from quire.types import QuireError


def load_tokenizer(files: ModelFiles) -> Tokenizer | None:
    """The tokenizer, or None for a folder without one, which then takes token ids only."""
    if files.kind == "gguf":
        from quire.files.gguf import open_gguf  # imports numpy, which `--help` does not need

        return Tokenizer.from_gguf(open_gguf(files.path).metadata)
    folder = Path(files.path)
    return Tokenizer.from_folder(folder) if (folder / "tokenizer.json").exists() else None


def lazy_template(tokenizer: Tokenizer | None, override: str | None) -> Callable[[], ChatTemplate]:
    """A function that compiles the template at its first call, so that raw prompts do not pay for it. An override is
    compiled now, because a wrong path must fail at start and not at the first request."""
    made: list[ChatTemplate] = []

    def template() -> ChatTemplate:
        if tokenizer is None:
            raise QuireError("no_tokenizer", "This model has no tokenizer.", "Send token ids instead of messages.")
        if not made:
            made.append(template_for(tokenizer, override))
        return made[0]

    if override is not None:
        template()
    return template
