"""A pipeline over two machines, here two addresses of the loopback network: the tokens of one, and what is refused."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.llm import LLM
from quire.parallel.topology import read_topology
from quire.types import QuireError
from tests.cpu.tiny_llm import make_tiny_llm
from tests.dist.test_processes import KNOBS, answers, ranks_of, tokens_of
from tests.e2e.conftest import ROOT

NODE = '[[node]]\naddress = "127.0.0.{}"\nport = {}\n'


def free_port() -> int:
    """A port that is free on both addresses, and the next one, too."""
    for _ in range(100):
        port = random.randrange(20000, 60000)
        try:
            for host in ("127.0.0.1", "127.0.0.2"):
                for place in (port, port + 1):
                    with socket.socket() as probe:
                        probe.bind((host, place))
        except OSError:
            continue
        return port
    pytest.skip("no free port")


def write_topology(folder: Path, *nodes: str, secret: str = "s" * 32, head: str = "") -> Path:
    (folder / "secret").write_text(secret)
    path = folder / "topology.toml"
    path.write_text('secret_file = "secret"\n' + head + "".join(nodes))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llm(tmp_path_factory.mktemp("tiny"), max_position_embeddings=256)


@pytest.fixture
def topology(tmp_path: Path) -> Iterator[Path]:
    """Two nodes, of which the second runs."""
    port = free_port()
    path = write_topology(tmp_path, NODE.format(1, port), NODE.format(2, port))
    command = [sys.executable, "-m", "quire", "node", "--topology", str(path), "--node-rank", "1"]
    agent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    assert agent.stdout is not None and "listens at tcp:127.0.0.2" in agent.stdout.readline()
    yield path
    agent.send_signal(signal.SIGTERM)
    agent.wait(60)


def test_a_stage_on_another_machine(topology: Path, folder: Path) -> None:
    """Also after a rank was lost on either machine."""
    expected = answers(folder)
    llm = LLM(str(folder), **KNOBS, pp=2, topology=str(topology), rank_timeout=20.0)
    try:
        assert tokens_of(llm) == expected
        local = ranks_of(llm).pids[0]
        os.kill(local, signal.SIGKILL)
        assert tokens_of(llm) == expected
        assert ranks_of(llm).pids[0] != local
        ranks_of(llm)._ranks[1].process.kill()
        assert tokens_of(llm) == expected
    finally:
        llm.close()


def test_a_node_that_does_not_answer(tmp_path: Path, folder: Path) -> None:
    port = free_port()
    path = write_topology(tmp_path, NODE.format(1, port), NODE.format(2, port))
    with pytest.raises(QuireError, match=rf"Node 1 at 127\.0\.0\.2:{port} does not answer: .*refused") as error:
        LLM(str(folder), **KNOBS, pp=2, topology=str(path))
    assert "\n" not in str(error.value)


def test_another_secret(topology: Path, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "secret").write_text("x" * 32)
    (other / "topology.toml").write_text(topology.read_text())
    with pytest.raises(QuireError, match="Node 1 at .* has another secret"):
        LLM(str(folder), **KNOBS, pp=2, topology=str(other / "topology.toml"))


def test_the_number_of_stages_is_that_of_the_nodes(tmp_path: Path, folder: Path) -> None:
    path = write_topology(tmp_path, NODE.format(1, 7600), NODE.format(2, 7600))
    with pytest.raises(QuireError, match="The topology has 2 nodes, with one pipeline stage each"):
        LLM(str(folder), **KNOBS, topology=str(path), tp=2)


@pytest.mark.parametrize(
    ("nodes", "head", "secret", "what"),
    [
        ([NODE.format(1, 7600)], "", "s" * 32, r"needs at least two \[\[node\]\] tables"),
        ([NODE.format(1, 7600)] * 2, "", "s" * 32, r"Nodes 0 and 1 of .* have the same address, 127\.0\.0\.1:7600"),
        ([NODE.format(1, 7600), NODE.format(1, 7601)], "", "s" * 32, "the same address, 127.0.0.1:7601"),
        (
            [NODE.format(1, 7600), NODE.format(2, 70000)],
            "",
            "s" * 32,
            "Node 1 of .* needs a port from 1 to 65534, not 70000",
        ),
        ([NODE.format(1, 7600), "[[node]]\nadress = 'x'\n"], "", "s" * 32, "unknown key 'adress', perhaps 'address'"),
        ([NODE.format(1, 7600), "[[node]]\nport = 3\n"], "", "s" * 32, "Node 1 of .* has no address"),
        ([NODE.format(1, 7600), NODE.format(2, 7600)], "axes = 3\n", "s" * 32, "unknown key 'axes'"),
        ([NODE.format(1, 7600), NODE.format(2, 7600)], "", "short", "has 5 bytes, fewer than 16"),
        (["[["], "", "s" * 32, "can't be read"),
    ],
)
def test_bad_topologies(nodes: list[str], head: str, secret: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(QuireError, match=what) as error:
        read_topology(write_topology(tmp_path, *nodes, head=head, secret=secret))
    assert "\n" not in str(error.value)
