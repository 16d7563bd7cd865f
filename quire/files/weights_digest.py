"""The digest of a model's weights, by which cached blocks of different models are told apart.

Whole files are hashed, in pieces by several threads, since a fine-tuned model may differ from its origin in a few bytes
only. A note keeps the digest of files that have not changed since.
"""

from __future__ import annotations

import json
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from quire.files.source import ModelFiles
from quire.machine import read_machine

PIECE = 32 << 20
DIGEST_BYTES = 20
MAX_NOTES = 64
MAX_NOTE_BYTES = 1 << 20


def weights_digest(files: ModelFiles, settings: str, note: Path | None = None) -> bytes:
    """Return a digest of the weight files, the config and `settings`, which change what the weights compute.

    `note`: a JSON file that keeps the digests of unchanged files.
    """
    if files.kind == "gguf":
        paths = [files.path]
    else:
        paths = sorted([*files.path.glob("*.safetensors"), *files.path.glob("config.json")])
        if not any(path.suffix == ".safetensors" for path in paths):
            return secrets.token_bytes(DIGEST_BYTES)  # random weights, which no other engine has
    total = blake2b(settings.encode(), digest_size=DIGEST_BYTES)
    for path in paths:
        total.update(_file_digest(path, note))
    return total.digest()


def _file_digest(path: Path, note: Path | None) -> bytes:
    found = path.stat()
    name = str(path.resolve())
    state = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
    known = _read_note(note)
    if isinstance(entry := known.get(name), list) and entry[:-1] == state:
        with suppress(ValueError, TypeError):
            return bytes.fromhex(entry[-1])
    with ThreadPoolExecutor(max(1, read_machine().num_usable_cores)) as threads:
        pieces = threads.map(lambda first: _piece_digest(path, first), range(0, max(1, found.st_size), PIECE))
        digest = blake2b(b"".join(pieces), digest_size=DIGEST_BYTES).digest()
    if note is not None:
        known[name] = [*state, digest.hex()]
        _write_note(note, dict(list(known.items())[-MAX_NOTES:]))
    return digest


def _piece_digest(path: Path, first: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(first)
        return blake2b(file.read(PIECE), digest_size=DIGEST_BYTES).digest()


def _read_note(note: Path | None) -> dict[str, object]:
    if note is None:
        return {}
    with suppress(OSError, ValueError):
        if note.stat().st_size <= MAX_NOTE_BYTES:
            known = json.loads(note.read_text(encoding="utf-8"))
            return known if isinstance(known, dict) else {}
    return {}


def _write_note(note: Path, known: dict[str, object]) -> None:
    """Write the note, or leave it: without one the files are hashed again."""
    temporary = note.with_name(f"{note.name}.{os.getpid()}.tmp")
    with suppress(OSError):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(known, file)
        os.replace(temporary, note)
