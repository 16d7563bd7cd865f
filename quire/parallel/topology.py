"""A topology file: the machines that compute one model together, one pipeline stage on each.

    secret_file = "quire.secret"      # the same bytes on all nodes
    [[node]]
    address = "10.0.0.1"              # where `quire serve --topology FILE` runs
    port = 7600
    [[node]]
    address = "10.0.0.2"              # where `quire node --topology FILE --node-rank 1` runs
    port = 7600
    backup = "10.1.0.2"               # address of this node over another link, taken when the first one fails

A node listens at its port for the engine, and at the next one for other stages.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.types import QuireError

KEYS = ("secret_file", "node")
NODE_KEYS = ("address", "port", "backup")
MIN_SECRET = 16  # bytes


@dataclass(frozen=True, slots=True)
class GroupNode:
    """One machine."""

    rank: int
    address: str
    port: int
    backup: str | None = None

    @property
    def control(self) -> str:
        """Where the node agent listens for the engine."""
        return f"tcp:{self.address}:{self.port}"

    @property
    def pipes(self) -> list[str]:
        """Where the node's stage listens for other stages, the usual link first."""
        hosts = [self.address] if self.backup is None else [self.address, self.backup]
        return [f"tcp:{host}:{self.port + 1}" for host in hosts]


@dataclass(frozen=True, slots=True)
class Topology:
    """All machines of a group, by stage, and the secret that their processes prove to each other."""

    nodes: tuple[GroupNode, ...]
    secret: bytes


def read_topology(path: Path) -> Topology:
    """Returns what a topology file says, checked as a whole. Raises an error in one line."""
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _bad(f"The topology {path} can't be read: {error}") from None
    _check_keys(fields, KEYS, f"The topology {path}")
    tables = fields.get("node")
    if not isinstance(tables, list) or len(tables) < 2:
        raise _bad(f"The topology {path} needs at least two [[node]] tables")
    nodes = tuple(_read_node(index, table, path) for index, table in enumerate(tables))
    seen: dict[tuple[str, int], int] = {}
    for node in nodes:
        for host in {node.address, node.backup or node.address}:
            for port in (node.port, node.port + 1):
                other = seen.setdefault((host, port), node.rank)
                if other != node.rank:
                    raise _bad(f"Nodes {other} and {node.rank} of {path} have the same address, {host}:{port}")
    return Topology(nodes, _read_secret(fields.get("secret_file"), path))


def _read_node(index: int, table: Any, path: Path) -> GroupNode:
    where = f"Node {index} of {path}"
    if not isinstance(table, dict):
        raise _bad(f"{where} is no table")
    _check_keys(table, NODE_KEYS, where)
    address, port, backup = table.get("address"), table.get("port"), table.get("backup")
    if not isinstance(address, str) or not address:
        raise _bad(f"{where} has no address")
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65535:
        raise _bad(f"{where} needs a port from 1 to 65534, not {port!r}")
    if backup is not None and not isinstance(backup, str):
        raise _bad(f"{where} has a backup that is no address: {backup!r}")
    return GroupNode(index, address, port, backup)


def _read_secret(name: Any, path: Path) -> bytes:
    if not isinstance(name, str):
        raise _bad(f"The topology {path} names no secret_file")
    try:
        secret = (path.parent / name).read_bytes().strip()
    except OSError as error:
        raise _bad(f"The secret of {path} can't be read: {error}") from None
    if len(secret) < MIN_SECRET:
        raise _bad(f"The secret of {path} has {len(secret)} bytes, fewer than {MIN_SECRET}")
    return secret


def _check_keys(fields: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise _bad(f"{where} has an unknown key {name!r}{f', perhaps {near[0]!r}' if near else ''}")


def _bad(what: str) -> QuireError:
    return QuireError("invalid_topology", f"{what}.", "See docs/parallel.md.", param="topology")
