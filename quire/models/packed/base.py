"""What all formats share: `Packed`, the description of a packed matrix (or a stack of them) and the tensors that it
consists of, and checks of such tensors from a file's header alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from quire.files.safetensors import TensorEntry
from quire.kernels.formats.packed_ints import BLOCK, GROUPED, Grouped
from quire.models.weight_errors import bad_weights
from quire.types import QuireError

FLOATS = ("F32", "BF16", "F16")

Entries = Mapping[str, TensorEntry]


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """Read access to the tensors of a packed matrix, on the device that decodes them."""

    open: Callable[[str], safe_open]  # tensor name -> open file that holds it
    entry: int | None  # index into a stack of matrices; None: tensors hold one matrix
    device: torch.device

    def whole(self, name: str) -> Tensor:
        """Returns all of a tensor, including all entries of a stack."""
        return self.open(name).get_tensor(name).to(self.device)

    def rows(self, name: str, first: int, count: int) -> Tensor:
        found, rows = self.open(name).get_slice(name), slice(first, first + count)
        return (found[rows] if self.entry is None else found[self.entry, rows]).to(self.device)

    def columns(self, name: str, first: int, count: int) -> Tensor:
        assert self.entry is None
        return self.open(name).get_slice(name)[:, first : first + count].to(self.device)


class Packed(Protocol):
    """One packed matrix, or a stack of them, which can be decoded a few rows at a time."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Decoded shape: [rows, columns], or [entries, rows, columns]."""

    @property
    def uses(self) -> tuple[str, ...]:
        """Names of the file's tensors that it consists of."""

    @property
    def kind(self) -> str:
        """Name of the packed format, which schemes use to choose how to keep the weight."""

    def decode(self, stored: StoredTensors, first: int, count: int) -> Tensor:
        """Returns rows of a matrix, [count, columns] float32."""

    def blocks(self, stored: StoredTensors) -> tuple[str, Tensor] | None:
        """Returns a GGUF type name and the same values as its blocks; None if no GGUF type holds them exactly."""


# Finds the packed tensors among a file's entries. The callable reads a tensor whose contents the description needs.
Finder = Callable[[Entries, Callable[[str], Tensor]], dict[str, Packed]]


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """Integers with scales for groups of columns. `take` reads rows of them from one format's tensors."""

    shape: tuple[int, ...]
    uses: tuple[str, ...]
    kind: str  # if in `GROUPED`, a GGUF type holds the same values
    take: Callable[[StoredTensors, int, int], Grouped]

    def decode(self, stored: StoredTensors, first: int, count: int) -> Tensor:
        return self.take(stored, first, count).floats()

    def blocks(self, stored: StoredTensors) -> tuple[str, Tensor] | None:
        form = GROUPED.get(self.kind)
        return None if form is None else (form, self.take(stored, 0, self.shape[0]).blocks(form))


def grouped_kind(name: str, bits: int, group: int | None, columns: int, has_zeros: bool) -> str:
    """Returns the kind of a grouped integer matrix, or `name` if no GGUF type fits. `group`: consecutive columns that
    share a scale; None if they are not consecutive.
    """
    if group is None or group % BLOCK or columns % group:
        return name
    if bits == 8:
        return name if has_zeros else "INT8"
    return "INT4" if bits == 4 and not has_zeros else "UINT4"


def group_size(scales: str, columns: int, groups: int, declared: int) -> int:
    """Returns the columns that share a scale: `declared` by config.json, where -1 means all of them, or else derived
    from the number of groups, since single layers may differ from the config.
    """
    size = columns if declared == -1 else min(declared, columns)
    if groups and -(-columns // size) != groups and columns % groups == 0:
        size = columns // groups
    if not groups or -(-columns // size) != groups:
        raise bad_weights(f"{scales} has {groups} groups, where {columns} inputs in groups of {size} are needed")
    return size


def check_entry(entries: Entries, name: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> TensorEntry:
    """Returns the entry of this name, which must have one of these dtypes and shapes."""
    entry = entries.get(name)
    if entry is None:
        raise bad_weights(f"{name} is missing, although the tensors that need it are there")
    check_filled(name, entry)
    if entry.dtype not in dtypes or (shapes and entry.shape not in shapes):
        wanted = f"{' or '.join(dtypes)} {' or '.join(str(list(shape)) for shape in shapes)}".strip()
        raise bad_weights(f"{name} is {entry.dtype} {list(entry.shape)}, where its layer needs {wanted}")
    return entry


def check_filled(name: str, entry: TensorEntry) -> None:
    """Refuses an empty tensor."""
    if 0 in entry.shape:
        raise bad_weights(f"{name} is empty: {list(entry.shape)}")


def unsupported(what: str, hint: str = "Use the original checkpoint, one in FP8, or a GGUF file.") -> QuireError:
    return QuireError("unsupported_model", f"{what}.", hint)


def read_order(name: str, stored: StoredTensors, groups: int) -> Tensor:
    """Returns each column's group index, [columns] int64."""
    of_column = stored.whole(name).long()
    if not bool(((of_column >= 0) & (of_column < groups)).all()):
        raise bad_weights(f"{name} refers to groups without scales")
    return of_column


def read_group_size(config: Mapping[str, Any], default: int) -> int:
    """Returns the group size of the config; -1 means that all columns share a scale."""
    declared = config.get("group_size")
    return default if declared is None else declared if declared == -1 else whole_number(config, "group_size", default)


def whole_number(config: Mapping[str, Any], key: str, default: int) -> int:
    value = default if config.get(key) is None else config[key]
    if type(value) is not int or value < 1:
        what = f"{key} of quantization_config in config.json is {value!r}, where a whole number above 0 is needed."
        raise QuireError("bad_config", what, "Check config.json.")
    return value
