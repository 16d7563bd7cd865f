"""`quire pull MODEL`: fetch a model, so that later starts need no network.

Progress goes to stderr; the result goes to stdout as one line or one JSON object.
"""

from __future__ import annotations

from argparse import SUPPRESS, BooleanOptionalAction, Namespace
from pathlib import Path
from typing import Any

from quire.cli.output import write_json, write_text
from quire.config_build import config_from_args


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "pull",
        usage="quire pull MODEL [options]",
        help="fetch a model",
        description="Fetch a built-in model or a hub model into the cache, and print where it lies.",
    )
    parser.add_argument("model", metavar="MODEL", help="built-in name, owner/name, owner/name:QUANT, owner/name/x.gguf")
    # Defaults are suppressed, since a settings file or the environment may set these knobs too.
    parser.add_argument("--revision", default=SUPPRESS, metavar="TEXT", help="hub revision (branch, tag or commit)")
    parser.add_argument("--hub-token", default=SUPPRESS, metavar="TEXT", help="hub access token (default: HF_TOKEN)")
    offline_help = "use no network; show only what is already here"
    parser.add_argument("--offline", action=BooleanOptionalAction, default=SUPPRESS, help=offline_help)
    parser.add_argument("--config", dest="config_file", type=Path, metavar="FILE", help="settings in TOML")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: Namespace) -> int:
    from quire.files.progress import format_bytes
    from quire.files.source import resolve_model
    from quire.files.store import file_sizes

    model = config_from_args(args).model
    found = resolve_model(model.model, revision=model.revision, token=model.hub_token, offline=model.offline)
    num_bytes = sum(file_sizes(found.path).values())
    if args.json:
        facts = {"model": found.name, "kind": found.kind, "path": str(found.path), "bytes": num_bytes}
        write_json({**facts, "source": found.source})
    else:
        write_text(f"{found.name}: {found.path} ({format_bytes(num_bytes)})\n")
    return 0
