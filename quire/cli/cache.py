"""`quire cache`: list, verify and prune a cache folder, and carry its sessions to other machines."""

from __future__ import annotations

import time
from argparse import ArgumentTypeError, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quire.cli.output import write_json, write_text
from quire.config_build import parse_size

ACTIONS = {
    "ls": "what models and sessions it holds",
    "verify": "read every block and compare it with its name and checksum",
    "prune": "delete old or surplus blocks, and expired sessions",
    "export": "write a session with its cache to a file",
    "import": "take over an exported session",
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "cache",
        usage="quire cache ls|verify|prune|export|import FOLDER [options]",
        help="look after a folder that keeps KV cache",
        description="Look after a folder that keeps KV cache across restarts. No engine should use it meanwhile.",
    )
    actions = parser.add_subparsers(title="actions", dest="action", required=True, prog="quire cache")
    for name, summary in ACTIONS.items():
        action = actions.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        action.add_argument("folder", metavar="FOLDER", type=Path, help="the cache folder")
        if name in ("export", "import"):
            _add_session_flags(action, name)
        elif name == "verify":
            action.add_argument("--delete", action="store_true", help="delete what is damaged")
        elif name == "prune":
            action.add_argument("--keep", type=_size, metavar="SIZE", help="delete the least recently used above this")
            action.add_argument("--older-than", type=_days, metavar="DAYS", help="delete what was not used for so long")
            action.add_argument("--weights", metavar="DIGEST", help="delete all blocks of this model, as `ls` names it")
        action.add_argument("--json", action="store_true", help="print one JSON object")


def _add_session_flags(action: Any, name: str) -> None:
    if name == "export":
        action.add_argument("session", metavar="SESSION", help="the session's id")
    action.add_argument("file", metavar="FILE", type=Path, help="the exported session")
    owner_help = "key whose session it is, where a server made it (default: none, as LLM and `quire chat` have it)"
    action.add_argument("--owner-key", metavar="KEY", help=owner_help)
    if name == "import":
        action.add_argument("--name", metavar="ID", help="its new id (default: the one that it has)")


def run(args: Namespace) -> int:
    from quire.cache.tiers import maintenance
    from quire.cache.tiers.session_files import export_session, import_session

    folder = args.folder.expanduser()
    if args.action == "ls":
        return _list(folder, args.json)
    if args.action == "verify":
        return _verify(folder, args)
    if args.action == "prune":
        files, freed = maintenance.prune(folder, keep=args.keep, older_than=args.older_than, weights=args.weights)
        return _say(args.json, {"files": files, "bytes": freed}, f"deleted {files} files, {_bytes(freed)}")
    if args.action == "export":
        maintenance.open_cache(folder)
        info = export_session(folder, _owner(args.owner_key) or "", args.session, args.file)
    else:
        info = import_session(folder, args.file, owner=_owner(args.owner_key), name=args.name)
    shown = f"{info.id}: {info.saved_tokens} of {info.num_tokens} tokens, {_bytes(info.num_bytes)}"
    return _say(args.json, {"id": info.id, "tokens": info.saved_tokens, "bytes": info.num_bytes}, shown)


def _list(folder: Path, as_json: bool) -> int:
    from quire.cache.tiers.maintenance import list_models, list_sessions

    models = list_models(folder)
    sessions = [(path, session) for path, session in list_sessions(folder)]
    if as_json:
        shown = {name: {**asdict(usage), "groups": sorted(usage.groups)} for name, usage in models.items()}
        kept = [
            {"id": s.id, "tokens": s.length, "bytes": s.num_bytes, "expires_at": s.expires_at, "model": s.weights.hex()}
            for _, s in sessions
            if s is not None
        ]
        write_json({"models": shown, "sessions": kept})
        return 0
    lines = [f"{'weights':<18} {'files':>8} {'size':>10}  last used"]
    for name, usage in sorted(models.items(), key=lambda one: -one[1].used_at):
        lines.append(f"{name[:16]:<18} {usage.num_files:>8} {_bytes(usage.num_bytes):>10}  {_when(usage.used_at)}")
    for path, session in sessions:
        if session is None:
            lines.append(f"session file {path.name}: damaged")
        else:
            ends = "expired" if session.expires_at < time.time() else f"until {_when(session.expires_at)}"
            lines.append(f"session {session.id}: {session.length} tokens, {_bytes(session.num_bytes)}, {ends}")
    write_text("\n".join(lines) + "\n")
    return 0


def _verify(folder: Path, args: Namespace) -> int:
    from quire.cache.tiers.maintenance import verify

    found = verify(folder, delete=args.delete)
    facts = {
        "files": found.num_files,
        "bytes": found.num_bytes,
        "damaged": [str(path) for path in found.damaged],
        "incomplete_sessions": found.incomplete,
    }
    lines = [f"{found.num_files} files, {_bytes(found.num_bytes)}: {len(found.damaged)} damaged"]
    lines += [f"damaged: {path}" for path in found.damaged]
    lines += [f"session {name}: some of its blocks are gone; its prefix is computed again" for name in found.incomplete]
    _say(args.json, facts, "\n".join(lines))
    return int(bool(found.damaged))


def _say(as_json: bool, facts: dict[str, Any], text: str) -> int:
    if as_json:
        write_json(facts)
    else:
        write_text(text + "\n")
    return 0


def _owner(key: str | None) -> str | None:
    """The owner id under which a server keeps a key's sessions."""
    if key is None:
        return None
    from quire.server.http.keys import owner_of_key

    return owner_of_key(key)


def _bytes(count: int) -> str:
    from quire.files.progress import format_bytes

    return format_bytes(count)


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def _size(text: str) -> int:
    size = parse_size(text)
    if size is None:
        raise ArgumentTypeError(f"{text!r} is no number of bytes, such as 512M or 2GiB")
    return size


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = -1.0
    if not 0 <= days < 1e6:
        raise ArgumentTypeError(f"{text!r} is no number of days")
    return days * 86400
