"""The file that keeps the outputs of earlier requests, for suffix matching, when the engine is closed.

    magic, 8 bytes | SHA-256 of the rest, 32 bytes | MessagePack: [[salt, tokens], ...], least recently used first

It is in the folder of `--cache-dir`, beside the KV cache of the same requests, and readable by its owner only. A file
that is damaged, or has tokens that the model does not have, counts as none.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

MAGIC = b"QuireOu\x01"
MAX_BYTES = 8 << 20

Kept = list[tuple[bytes, list[int]]]  # salt, outputs with a boundary behind each


class HistoryFile:
    """One model's file. The vocabulary's size bounds the tokens that are read."""

    def __init__(self, folder: Path, weights: bytes, vocab_size: int):
        """`weights`: the version of the weights, so that models never read each other's tokens."""
        self.path = folder / f"outputs-{weights.hex()[:32]}"
        self._vocab_size = vocab_size

    def read(self, boundary: int) -> Kept:
        """Return what was kept, empty if there is nothing or it is damaged. `boundary`: the only other number."""
        try:
            with open(self.path, "rb") as file:
                data = file.read(MAX_BYTES + 1)
        except OSError:
            return []
        head, body = data[: len(MAGIC) + 32], data[len(MAGIC) + 32 :]
        if len(data) > MAX_BYTES or head != MAGIC + hashlib.sha256(body).digest():
            return []
        try:
            kept = msgspec.msgpack.decode(body, type=Kept)
        except msgspec.MsgspecError:
            return []
        known = range(self._vocab_size)
        return [(salt, tokens) for salt, tokens in kept if all(token in known or token == boundary for token in tokens)]

    def write(self, kept: Sequence[tuple[bytes, Sequence[int]]]) -> None:
        """Replace the file, or leave it as it is if that fails."""
        body = msgspec.msgpack.encode(kept)
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            number, name = tempfile.mkstemp(dir=self.path.parent, prefix=".outputs-")  # readable by its owner only
            try:
                with open(number, "wb") as file:
                    file.write(MAGIC + hashlib.sha256(body).digest() + body)
                os.replace(name, self.path)
            except OSError:
                os.unlink(name)
                raise
