"""Reads a GGUF file's metadata strictly: a value of the wrong kind is an error that names it. `gguf` and the styles of
architectures (`gguf_names`, `gguf_hybrid`) call it.
"""

from __future__ import annotations

from typing import Any

from quire.files.gguf import GGUFFile
from quire.types import QuireError


def key_of(file: GGUFFile, key: str) -> str:
    return f"{file.metadata['general.architecture']}.{key}"


def get(file: GGUFFile, key: str, default: Any) -> Any:
    """A number or word of this architecture; a default of some type also says which type it must have."""
    value = file.metadata.get(key_of(file, key), default)
    if isinstance(value, list) and len(set(value)) == 1:  # per layer, and the same in each
        value = value[0]
    fits = isinstance(value, (int, float)) if isinstance(default, float) else isinstance(value, type(default))
    if (default is not None and not fits) or isinstance(value, (bool, list)):
        raise QuireError(
            "bad_config", f"{file.path} has {key_of(file, key)}={value!r:.80}.", "Fetch or convert it again."
        )
    return value


def get_flag(file: GGUFFile, key: str, default: bool) -> bool:
    value = file.metadata.get(key_of(file, key), default)
    if not isinstance(value, bool):
        raise QuireError(
            "bad_config", f"{file.path} has {key_of(file, key)}={value!r:.80}.", "Fetch or convert it again."
        )
    return value


def need(file: GGUFFile, key: str) -> int:
    if key_of(file, key) not in file.metadata:
        raise QuireError("bad_config", f"{file.path} lacks {key_of(file, key)}.", "Fetch or convert it again.")
    return get(file, key, 0)
