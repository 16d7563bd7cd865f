"""Strict readers for a GGUF file's metadata: a value of the wrong type is an error that names it. `checkpoint` and the
architecture styles (`tensor_names`, `hybrid_styles`, `special_styles`) use them.
"""

from __future__ import annotations

from typing import Any

from quire.files.gguf import GGUFFile
from quire.types import QuireError


def key_of(file: GGUFFile, key: str) -> str:
    """Returns the full key of an architecture's metadata."""
    return f"{file.metadata['general.architecture']}.{key}"


def get(file: GGUFFile, key: str, default: Any) -> Any:
    """Returns a number or string of this architecture. The type of a default is the required type."""
    value = file.metadata.get(key_of(file, key), default)
    if isinstance(value, list) and len(set(value)) == 1:  # per layer, and equal in all
        value = value[0]
    fits = isinstance(value, (int, float)) if isinstance(default, float) else isinstance(value, type(default))
    if (default is not None and not fits) or isinstance(value, (bool, list)):
        raise bad_metadata(file, key)
    return value


def get_flag(file: GGUFFile, key: str, default: bool) -> bool:
    value = file.metadata.get(key_of(file, key), default)
    if not isinstance(value, bool):
        raise bad_metadata(file, key)
    return value


def get_layers(file: GGUFFile, key: str) -> list[int] | None:
    """Returns a number (or flag) per layer; None: the file gives none, or one for all."""
    values = file.metadata.get(key_of(file, key))
    if not isinstance(values, list):
        return None
    if len(values) != need(file, "block_count") or not all(isinstance(value, int) for value in values):
        raise bad_metadata(file, key)
    return values[: count_layers(file)]


def need_layers(file: GGUFFile, key: str) -> list[int]:
    """Returns a number (or flag) per layer, which the file must give."""
    values = get_layers(file, key)
    if values is None:
        need(file, key)
        raise bad_metadata(file, key)
    return values


def count_layers(file: GGUFFile) -> int:
    """Returns the number of layers, without draft layers, which follow the others and are not used."""
    num_layers, drafting = need(file, "block_count"), get(file, "nextn_predict_layers", 0)
    if not 0 <= drafting < max(num_layers, 1):
        raise bad_metadata(file, "nextn_predict_layers")
    return num_layers - drafting


def need(file: GGUFFile, key: str) -> int:
    """Returns a number that the file must give."""
    if key_of(file, key) not in file.metadata:
        raise QuireError("bad_config", f"{file.path} lacks {key_of(file, key)}.", "Fetch or convert it again.")
    return get(file, key, 0)


def get_per_layer(file: GGUFFile, key: str, default: int | None = None) -> list[int]:
    """Returns a number (or flag) per layer, from files that may give one for all."""
    numbers = get_layers(file, key)
    if numbers is not None:
        return numbers
    one = file.metadata.get(key_of(file, key), default)
    if one is None:
        need(file, key)
    if not isinstance(one, int):
        raise bad_metadata(file, key)
    return [one] * count_layers(file)


def bad_metadata(file: GGUFFile, key: str) -> QuireError:
    """Returns the error for a metadata value that no model can have."""
    value = file.metadata.get(key_of(file, key))
    return QuireError("bad_config", f"{file.path} has {key_of(file, key)}={value!r:.80}.", "Fetch or convert it again.")
