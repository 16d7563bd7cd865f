"""Pipes over sockets: order, sizes, links that break, backup links, and strangers."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire.parallel.pipes import PipeTimeout
from quire.parallel.socket_pipes import SocketPipe, connect, listen

SECRET = b"s" * 32


class Relay:
    """A link that can be cut: it forwards one TCP port to another."""

    def __init__(self, target: str):
        self._target = target
        self._server = listen("tcp:127.0.0.1:0")
        self.address = f"tcp:127.0.0.1:{self._server.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self.num_links = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, for_ever: bool = False) -> None:
        if for_ever:
            self._server.close()
        for raw in self._open:
            with_shutdown(raw)
        self._open.clear()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
                far = connect(self._target, 5)
            except OSError:
                return
            self.num_links += 1
            self._open += [near, far]
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=forward, args=(source, target), daemon=True).start()


def with_shutdown(raw: socket.socket) -> None:
    with contextlib.suppress(OSError):
        raw.shutdown(socket.SHUT_RDWR)
    raw.close()


def forward(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with_shutdown(target)


@pytest.fixture
def pair() -> Iterator[tuple[SocketPipe, SocketPipe, list[Relay]]]:
    """Two stages over TCP, whose first and backup link are relays."""
    servers = [listen("tcp:127.0.0.1:0") for _ in range(2)]
    target = f"tcp:127.0.0.1:{servers[1].getsockname()[1]}"
    relays = [Relay(target), Relay(target)]
    first, second = (SocketPipe(stage, 2, servers[stage], SECRET, 60.0) for stage in range(2))
    first.open(0, {1: [relay.address for relay in relays]})
    second.open(0, {})
    yield first, second, relays
    for server in servers:
        server.close()


def test_tensors_arrive_whole_and_in_order(tmp_path: Path) -> None:
    pipes = [SocketPipe(stage, 3, listen(f"unix:{tmp_path}/{stage}"), SECRET, 60.0) for stage in range(3)]
    for pipe in pipes:
        pipe.open(0, {stage: [f"unix:{tmp_path}/{stage}"] for stage in range(3)})
    sent = [torch.randn(3, 5), torch.arange(4), torch.empty(0, 7), torch.randn(700, 600), torch.randn(2).double()]
    for x in sent:
        pipes[0].send(x, 1)
        pipes[2].send(x, 0)
    for x in sent:
        for got in (pipes[1].receive(0), pipes[0].receive(2)):
            assert got.dtype == x.dtype and torch.equal(got, x)


def test_no_message_is_lost_or_doubled_when_links_break(pair: tuple[SocketPipe, SocketPipe, list[Relay]]) -> None:
    first, second, relays = pair
    rng = random.Random(1)
    for number in range(200):
        first.send(torch.full((rng.randrange(1, 5000),), number), 1)
        second.send(torch.tensor([number]), 0)
        if number % 40 == 20:
            for relay in relays:
                relay.cut()
        if number % 3 == 0:
            assert int(second.receive(0)[0]) == number // 3
    for number in range(67, 200):
        assert int(second.receive(0)[0]) == number
    assert [int(first.receive(1)) for _ in range(200)] == list(range(200))
    assert sum(relay.num_links for relay in relays) > 2


def test_the_backup_link_is_taken(pair: tuple[SocketPipe, SocketPipe, list[Relay]]) -> None:
    first, second, (usual, backup) = pair
    first.send(torch.tensor([1]), 1)
    assert int(second.receive(0)) == 1 and (usual.num_links, backup.num_links) == (1, 0)
    usual.cut(for_ever=True)
    first.send(torch.tensor([2]), 1)
    assert int(second.receive(0)) == 2 and backup.num_links > 0


def test_a_new_group_forgets_what_was_on_its_way(tmp_path: Path) -> None:
    addresses = {stage: [f"unix:{tmp_path}/{stage}"] for stage in range(2)}
    first, second = (SocketPipe(stage, 2, listen(addresses[stage][0]), SECRET, 60.0) for stage in range(2))
    for generation in range(3):
        first.open(generation, addresses)
        second.open(generation, addresses)
        first.send(torch.tensor([generation]), 1)
        first.send(torch.tensor([99]), 1)
        assert int(second.receive(0)) == generation


def test_a_stranger_is_not_heard(tmp_path: Path) -> None:
    addresses = {stage: [f"unix:{tmp_path}/{stage}"] for stage in range(2)}
    pipe = SocketPipe(1, 2, listen(addresses[1][0]), SECRET, 0.5)
    pipe.open(0, {})
    stranger = SocketPipe(0, 2, listen(addresses[0][0]), b"x" * 32, 0.5)
    stranger.open(0, addresses)
    stranger.send(torch.tensor([1]), 1)
    with pytest.raises(PipeTimeout, match="Stage 0 sent nothing within"):
        pipe.receive(0)
    raw = connect(addresses[1][0], 5)
    raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 8)
    raw.settimeout(20)
    with contextlib.suppress(ConnectionResetError):
        while raw.recv(4096):  # it hears no more than a nonce and a proof that fits no secret of its own
            pass


def test_waiting_ends_when_the_group_has_lost_a_rank(tmp_path: Path) -> None:
    lost: list[bool] = []
    pipe = SocketPipe(1, 2, listen(f"unix:{tmp_path}/1"), SECRET, 600.0, lambda: bool(lost))
    pipe.open(0, {})
    lost.append(True)
    with pytest.raises(PipeTimeout, match="has lost a rank"):
        pipe.receive(0)
