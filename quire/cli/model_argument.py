"""The positional MODEL argument of `quire serve`, `chat`, `doctor` and `run`."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace

from quire.types import QuireError


def add_positional_model(parser: ArgumentParser) -> None:
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")


def take_positional_model(args: Namespace) -> Namespace:
    """Return `args` with the positional MODEL stored as `model`. Raises QuireError if --model is given too."""
    if args.positional_model is not None:
        if hasattr(args, "model"):
            raise QuireError("usage", "The model is named twice.", "Give MODEL or --model, not both.")
        args.model = args.positional_model
    return args


def looks_like_model(word: str) -> bool:
    """Return whether a word can name a model: a built-in one, a path that exists, or a hub id (owner/name)."""
    from quire.files.builtin import BUILT_IN

    is_id = word.count("/") == 1 and not any(character.isspace() for character in word)
    return word in BUILT_IN or is_id or word.endswith(".gguf") or os.path.lexists(os.path.expanduser(word))
