"""Pipes between stages that are processes: over Unix sockets on one machine, over TCP between machines.

Every stage listens at an address, and a stage connects to those after it. Messages are numbered and kept until the
other end has confirmed them, so a connection that breaks is made again, over the next address of the list (a backup
link), and nothing is lost or doubled. Both ends prove that they know the group's secret before anything else is read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import queue
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.parallel.pipes import PipeTimeout

MAGIC = b"QuirePipe1"
NONCE_BYTES, PROOF_BYTES = 32, 32
HELLO = struct.Struct("<10sIIQ")  # magic, stage, generation, number of the next message that is expected
FRAME = struct.Struct("<QIBB6xQQQQ")  # number, bytes, dtype, dimensions, shape
DTYPES = (torch.float32, torch.float64, torch.int64, torch.float16, torch.bfloat16, torch.uint8)
CONFIRM = 255  # in place of a dtype: the other end has all messages before this number
MAX_BYTES = 1 << 30
RETRY_SECONDS = 0.1  # between attempts to connect
BIND_SECONDS = 10.0
BEAT_SECONDS = 0.5  # of silence after which an end says that it is alive, and a link is cut after four of these
LOOK_SECONDS = 0.1  # between looks at `is_cancelled` while a message is awaited


def listen(address: str) -> socket.socket:
    """Returns a socket that listens at "unix:PATH" or "tcp:HOST:PORT"."""
    kind, _, place = address.partition(":")
    if kind == "unix":
        server = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(place)  # of a rank that this one replaces
        server.bind(place)
    else:
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        host, _, port = place.rpartition(":")
        _bind(server, (host, int(port)))
    server.listen(64)
    return server


def _bind(server: socket.socket, address: tuple[str, int]) -> None:
    """Binds to an address, which a process that is being replaced may hold for a moment."""
    deadline = time.monotonic() + BIND_SECONDS
    while True:
        try:
            server.bind(address)
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        time.sleep(RETRY_SECONDS)


def connect(address: str, seconds: float) -> socket.socket:
    """Returns a socket connected to a `listen` address."""
    kind, _, place = address.partition(":")
    if kind == "unix":
        raw = socket.socket(socket.AF_UNIX)
        raw.settimeout(seconds)
        raw.connect(place)
    else:
        host, _, port = place.rpartition(":")
        raw = socket.create_connection((host, int(port)), timeout=seconds)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return raw


def prove(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.new(secret, role + nonces, hashlib.sha256).digest()


def greet(raw: socket.socket, secret: bytes, connects: bool) -> bool:
    """Returns whether the other end knows the secret, after proving to it that this one does."""
    mine = os.urandom(NONCE_BYTES)
    raw.sendall(mine)
    theirs = bytes(read_exactly(raw, NONCE_BYTES))
    nonces = mine + theirs if connects else theirs + mine
    roles = (b"connects", b"accepts") if connects else (b"accepts", b"connects")
    raw.sendall(prove(secret, roles[0], nonces))
    return hmac.compare_digest(read_exactly(raw, PROOF_BYTES), prove(secret, roles[1], nonces))


def read_exactly(raw: socket.socket, count: int) -> bytearray:
    """Returns the next `count` bytes. Raises ConnectionError if the other end has closed."""
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = raw.recv_into(view)
        if not got:
            raise ConnectionError("closed")
        view = view[got:]
    return data


class _Peer:
    """One other stage: what is to be sent to it, what came from it, and the connection, if there is one."""

    def __init__(self, stage: int):
        self.stage = stage
        self.inbox: queue.Queue[Tensor] = queue.Queue()
        self.unconfirmed: deque[tuple[int, bytes]] = deque()
        self.next_number = 0  # of the next message to send
        self.expected = 0  # number of the next message to come
        self.next_write = 0  # number of the next message to write to the connection
        self.raw: socket.socket | None = None
        self.changed = threading.Condition()
        self.is_closed = False
        self.must_confirm = False

    def drop(self, raw: socket.socket | None) -> None:
        """Forgets a connection that broke."""
        with self.changed:
            if raw is not None and self.raw is raw:
                self.raw = None
            self.changed.notify_all()
        if raw is not None:
            with contextlib.suppress(OSError):
                raw.shutdown(socket.SHUT_RDWR)
            raw.close()


class SocketPipe:
    """Implements `Pipe`."""

    def __init__(
        self,
        stage: int,
        count: int,
        servers: socket.socket | Sequence[socket.socket],
        secret: bytes,
        seconds: float,
        is_cancelled: Callable[[], bool] = lambda: False,
    ):
        """`servers`: where other stages connect. `seconds`: deadline of receiving. `is_cancelled`: whether waiting
        has become useless."""
        self._stage, self._count = stage, count
        self._secret, self._seconds = secret, seconds
        self._is_cancelled = is_cancelled
        self._generation = -1
        self._peers: dict[int, _Peer] = {}
        for server in [servers] if isinstance(servers, socket.socket) else servers:
            threading.Thread(target=self._accept, args=(server,), name="quire-pipes", daemon=True).start()

    @property
    def stage(self) -> int:
        return self._stage

    @property
    def count(self) -> int:
        return self._count

    def open(self, generation: int, addresses: Mapping[int, Sequence[str]]) -> None:
        """Connects to the other stages of a new group. `addresses`: stage -> its address, then those of backup links.

        What was on its way in an earlier group is forgotten.
        """
        for peer in self._peers.values():
            with peer.changed:
                peer.is_closed = True
            peer.drop(peer.raw)
        self._peers = {stage: _Peer(stage) for stage in range(self._count) if stage != self._stage}
        self._generation = generation
        for peer in self._peers.values():
            threading.Thread(target=self._write, args=(peer,), name="quire-pipe-write", daemon=True).start()
            if peer.stage > self._stage:
                arguments = (peer, list(addresses[peer.stage]), generation)
                threading.Thread(target=self._connect, args=arguments, name="quire-pipe", daemon=True).start()

    def send(self, x: Tensor, to: int) -> None:
        peer, x = self._peers[to], x.contiguous()
        data = x.view(torch.uint8).numpy() if x.dtype is torch.bfloat16 else x.numpy()
        shape = [*x.shape, *[0] * (4 - x.dim())]
        with peer.changed:
            head = FRAME.pack(peer.next_number, data.nbytes, DTYPES.index(x.dtype), x.dim(), *shape)
            peer.unconfirmed.append((peer.next_number, head + data.tobytes()))
            peer.next_number += 1
            peer.changed.notify_all()

    def receive(self, source: int) -> Tensor:
        peer, deadline = self._peers[source], time.monotonic() + self._seconds
        while True:
            try:
                return peer.inbox.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                if self._is_cancelled():
                    raise PipeTimeout(source, "is in a group that has lost a rank") from None
                if time.monotonic() > deadline:
                    raise PipeTimeout(source, f"sent nothing within {self._seconds:g} s") from None

    # -- connections ------------------------------------------------------------------------------------------------

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                raw, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=self._welcome, args=(raw,), name="quire-pipe", daemon=True).start()

    def _welcome(self, raw: socket.socket) -> None:
        """Checks who has connected. Strangers are disconnected."""
        try:
            raw.settimeout(10)
            if not greet(raw, self._secret, connects=False):
                raise ConnectionError("a stranger")
            magic, stage, generation, expected = HELLO.unpack(read_exactly(raw, HELLO.size))
            deadline = time.monotonic() + self._seconds
            while generation > self._generation and time.monotonic() < deadline:
                time.sleep(0.01)  # this stage has not opened the new group yet
            peer = self._peers.get(stage)
            if magic != MAGIC or peer is None or generation != self._generation:
                raise ConnectionError("of another group")
            raw.sendall(HELLO.pack(MAGIC, self._stage, generation, peer.expected))
        except (OSError, struct.error):
            raw.close()
            return
        self._serve(peer, raw, expected)

    def _connect(self, peer: _Peer, addresses: list[str], generation: int) -> None:
        """Keeps a connection to a later stage, over the first address that works."""
        turn = 0
        while not peer.is_closed:
            try:
                raw = connect(addresses[turn % len(addresses)], 5 * RETRY_SECONDS + BEAT_SECONDS)
                raw.settimeout(4 * BEAT_SECONDS)
                if not greet(raw, self._secret, connects=True):
                    raise ConnectionError("a stranger")
                raw.sendall(HELLO.pack(MAGIC, self._stage, generation, peer.expected))
                magic, stage, other, expected = HELLO.unpack(read_exactly(raw, HELLO.size))
                if (magic, stage, other) != (MAGIC, peer.stage, generation):
                    raise ConnectionError("another stage")
            except (OSError, struct.error):
                turn += 1
                time.sleep(RETRY_SECONDS)
                continue
            self._serve(peer, raw, expected)
            turn += 1

    def _serve(self, peer: _Peer, raw: socket.socket, expected: int) -> None:
        """Reads a connection until it breaks. `expected`: number of the first message that the other end lacks."""
        is_remote = raw.family != socket.AF_UNIX
        raw.settimeout(4 * BEAT_SECONDS if is_remote else None)
        with peer.changed:
            old, peer.raw = peer.raw, raw
            self._confirm(peer, expected)
            peer.next_write = expected
            peer.changed.notify_all()
        if old is not None:
            peer.drop(old)
        try:
            while not peer.is_closed:
                self._read(peer, raw)
        except (OSError, struct.error, ValueError):
            pass
        peer.drop(raw)

    def _read(self, peer: _Peer, raw: socket.socket) -> None:
        number, num_bytes, kind, dims, *shape = FRAME.unpack(read_exactly(raw, FRAME.size))
        if kind == CONFIRM:
            with peer.changed:
                self._confirm(peer, number)
            return
        if num_bytes > MAX_BYTES or kind >= len(DTYPES) or dims > 4:
            raise ValueError("no message of a stage")
        data = read_exactly(raw, num_bytes)
        if number == peer.expected:
            flat = torch.from_numpy(np.frombuffer(data, np.uint8)) if num_bytes else torch.empty(0, dtype=torch.uint8)
            peer.inbox.put(flat.view(DTYPES[kind]).view(shape[:dims]))
            with peer.changed:
                peer.expected += 1
                peer.must_confirm = True
                peer.changed.notify_all()
        elif number > peer.expected:
            raise ValueError("a message is missing")

    @staticmethod
    def _confirm(peer: _Peer, number: int) -> None:
        while peer.unconfirmed and peer.unconfirmed[0][0] < number:
            peer.unconfirmed.popleft()

    def _write(self, peer: _Peer) -> None:
        """Writes what is to be sent to whatever connection there is, confirmations, and signs of life."""
        while not peer.is_closed:
            with peer.changed:
                if not self._has_news(peer):
                    peer.changed.wait(BEAT_SECONDS)
                raw, news = peer.raw, []
                if raw is not None:
                    news = [data for number, data in peer.unconfirmed if number >= peer.next_write]
                    peer.next_write = peer.next_number
                    news.append(FRAME.pack(peer.expected, 0, CONFIRM, 0, 0, 0, 0, 0))
                    peer.must_confirm = False
            if raw is None:
                continue
            try:
                raw.sendall(b"".join(news))
            except OSError:
                peer.drop(raw)

    @staticmethod
    def _has_news(peer: _Peer) -> bool:
        return peer.raw is not None and (peer.must_confirm or peer.next_write < peer.next_number)
