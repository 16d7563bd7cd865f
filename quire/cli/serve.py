"""`quire serve [MODEL]`: the HTTP server with OpenAI's and Anthropic's APIs; the engine runs in a separate process."""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

from quire import __version__
from quire.cli.model_argument import add_positional_model, take_positional_model
from quire.cli.output import print_note, waiting
from quire.cli.run import short_name
from quire.config_build import add_config_flags, config_from_args
from quire.files.source import resolve_model
from quire.types import QuireError

ENGINE_COMMAND = (sys.executable, "-m", "quire.cli.serve_engine")
PACKAGES = ("fastapi", "uvicorn", "httptools", "msgspec", "zmq", "prometheus_client")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        usage="quire serve [MODEL] [options]",
        help="answer OpenAI's and Anthropic's clients over HTTP",
        description="Serve a model over HTTP. Clients need nothing but the URL that is printed once it is ready.",
    )
    add_positional_model(parser)
    add_config_flags(parser)


def run(args: Namespace) -> int:
    """Serve until a signal stops the process; returns the exit code."""
    config = config_from_args(take_positional_model(args))
    if sys.platform == "win32":
        what = "quire serve can't run on Windows: it passes Unix sockets to its processes."
        raise QuireError("unsupported_system", what, "Use WSL, or `quire run` and the Python API.")
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        what = f"The Python package {missing[0]} is not installed."
        raise QuireError("missing_package", what, "`quire doctor` shows how to install it.")
    if config.server.host not in ("127.0.0.1", "::1", "localhost") and config.server.api_key is None:
        print_note(f"anyone who reaches {config.server.host} can use this server; --api-key makes it require a key.")
    model = config.model
    files = resolve_model(  # before the slow imports: a mistyped name fails at once, and fetching shows its own bar
        model.model,
        revision=model.revision,
        token=model.hub_token,
        offline=model.offline,
        random_weights=model.random_weights,
    )
    from quire.server.event_loop import run_event_loop  # imported late, so that --help and errors are fast
    from quire.server.run import serve

    with ExitStack() as loading:
        loading.enter_context(waiting(f"Loading {short_name(config)} …"))

        def ready(url: str) -> None:
            loading.close()
            print(f"Quire serves {short_name(config)} at {url}", flush=True)

        return run_event_loop(serve(config, files, ENGINE_COMMAND, ready, __version__))
