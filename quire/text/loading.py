"""A model's tokenizer and chat template, from its files. Called by `assemble` and by the HTTP process alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from quire.files.source import ModelFiles
from quire.text.template import ChatTemplate, template_for
from quire.text.tokenizer import Tokenizer
from quire.types import QuireError


def load_tokenizer(files: ModelFiles) -> Tokenizer | None:
    """None for a folder without one, such as a bare config.json: it is then driven by token ids."""
    if files.kind == "gguf":
        from quire.files.gguf import open_gguf  # it needs numpy, which `--help` does without

        return Tokenizer.from_gguf(open_gguf(files.path).metadata)
    folder = Path(files.path)
    return Tokenizer.from_folder(folder) if (folder / "tokenizer.json").exists() else None


def lazy_template(tokenizer: Tokenizer | None, override: str | None) -> Callable[[], ChatTemplate]:
    """Compiled when the first conversation comes, so that raw prompts do not pay for it; an override is checked now,
    because a wrong path is an error at start and not at the first request."""
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
