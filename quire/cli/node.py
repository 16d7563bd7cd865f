"""`quire node`: lets an engine on another machine start ranks here. See `quire.ranks.node_agent`."""

from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from quire.types import QuireError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "node",
        usage="quire node --topology FILE --node-rank N",
        help="start ranks for an engine on another machine",
        description="Wait for the engine of `quire serve --topology FILE`, which starts its ranks here.",
    )
    parser.add_argument("--topology", type=Path, required=True, metavar="FILE", help="the machines, in TOML")
    parser.add_argument(
        "--node-rank", type=int, metavar="N", help="index of this machine among them (default: RANK, as torchrun sets)"
    )


def run(args: Namespace) -> int:
    from quire.parallel.topology import read_topology  # imported late, so that --help is fast

    topology = read_topology(args.topology)
    rank = args.node_rank if args.node_rank is not None else int(os.environ.get("RANK", "-1"))
    if not 0 <= rank < len(topology.nodes):
        raise QuireError("usage", f"--node-rank must be from 0 to {len(topology.nodes) - 1}.")
    if rank == 0:
        raise QuireError("usage", "Node 0 runs `quire serve --topology FILE`, which needs no agent.")
    from quire.ranks.node_agent import NodeAgent

    def say(what: str) -> None:
        print(f"quire node: {what}", file=sys.stderr, flush=True)

    try:
        agent = NodeAgent(topology, rank, say)
    except OSError as error:
        node = topology.nodes[rank]
        what = f"Node {rank} can't listen at {node.address}:{node.port}: {error}."
        raise QuireError("node_unreachable", what, "The address must be of this machine, and free.") from None
    print(f"quire node {rank} listens at {topology.nodes[rank].control}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: agent.close())
    try:
        agent.run()
    finally:
        agent.close()
    return 0
