"""The server process of the chaos gate: a server with a faulty engine process and a detokenizer that may fail.

Started as `python -m quire.chaos.server_process ORDERS [options]`; the options are those of `quire serve`.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from quire import __version__
from quire.config_build import add_config_flags, config_from_args
from quire.files.source import ModelFiles, resolve_model
from quire.server.event_loop import run_event_loop
from quire.server.run import serve
from quire.text.loading import load_tokenizer
from quire.text.tokenizer import Tokenizer
from quire.types import QuireError


class FaultyTokenizer:
    """A tokenizer that fails to detokenize requests with `skip_special_tokens: false`, which only the gate sends."""

    def __init__(self, inner: Tokenizer):
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def shown_ids(self, ids: Sequence[int], skip_special: bool) -> Any:
        if not skip_special:
            raise RuntimeError("chaos: no text can be made of this")
        return self._inner.shown_ids(ids, skip_special)


def load_faulty_tokenizer(files: ModelFiles) -> Any:
    tokenizer = load_tokenizer(files)
    return None if tokenizer is None else FaultyTokenizer(tokenizer)


def main(orders: str, arguments: Sequence[str]) -> int:
    parser = ArgumentParser(prog="quire chaos server")
    add_config_flags(parser)
    command = (sys.executable, "-m", "quire.chaos.engine_process", orders)
    try:
        config = config_from_args(parser.parse_args(list(arguments)))
        model = config.model
        files = resolve_model(model.model, offline=model.offline, random_weights=model.random_weights)
        return run_event_loop(serve(config, files, command, print_url, __version__, load_faulty_tokenizer))
    except QuireError as error:
        print(f"quire: error: {error.what} {error.hint}", file=sys.stderr)
        return 1


def print_url(url: str) -> None:
    print(f"The server under test is ready at {url}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
