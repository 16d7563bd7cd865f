"""compressed-tensors (llm-compressor; Red Hat's and Moonshot's checkpoints): integers of 2 to 8 bits packed into words
(`X.weight_packed`), plain eight-bit integers (`X.weight` in I8), and floats, which `floats` handles. config.json gives
the bits of each layer, and whether it has zero points, by patterns of layer names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.kernels.formats.packed_ints import Grouped, unpack_bits
from quire.models.packed.base import (
    FLOATS,
    Entries,
    Finder,
    GroupedMatrix,
    Packed,
    StoredTensors,
    check_entry,
    group_size,
    grouped_kind,
    read_group_size,
    read_order,
    unsupported,
    whole_number,
)
from quire.models.packed.floats import Block, find_floats
from quire.models.weight_errors import bad_weights
from quire.types import QuireError

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
    "dense",
)
BITS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Quantization settings of config.json for the layers that `targets` match."""

    targets: tuple[str, ...]
    bits: int
    size: int  # columns that share a scale; -1: all of them
    is_symmetric: bool  # symmetric: no zero points
    rounds_inputs: bool  # activations are rounded to eight-bit integers as they come
    block: Block | None

    def matches(self, layer: str) -> bool:
        return any(_target_matches(target, layer) for target in self.targets)

    @property
    def targets_classes(self) -> bool:
        """Whether targets are module classes, which apply to all layers that no group names."""
        return any(target[:1].isupper() for target in self.targets)


def find_compressed(config: Mapping[str, Any]) -> Finder:
    form = config.get("format", "dense")
    if form not in FORMATS:
        raise unsupported(f"This checkpoint is in compressed-tensors' format {form!r}, which is not supported")
    for key in ("sparsity_config", "transform_config"):
        declared = config.get(key)
        if declared and not (isinstance(declared, dict) and declared.get("format", "") == "dense"):
            raise unsupported(f"This checkpoint has a {key}, which is not supported")
    groups = [] if form == "dense" else _read_groups(config.get("config_groups"))
    blocks = [group.block for group in groups if group.block is not None]
    floats = find_floats(blocks[0] if blocks else None)

    def find(entries: Entries, read: Callable[[str], Tensor]) -> dict[str, Packed]:
        found = floats(entries, read)
        for name, entry in entries.items():
            if name.endswith(".weight_packed") and entry.dtype == "I32":
                prefix = name.removesuffix(".weight_packed")
                found[f"{prefix}.weight"] = _words(prefix, entries, _group_of(prefix, groups))
            elif name.endswith(".weight") and entry.dtype == "I8":
                found[name] = _bytes(name.removesuffix(".weight"), entries, groups)
        return found

    return find


def _read_groups(config: Any) -> list[LayerGroup]:
    if not isinstance(config, dict) or not config:
        raise _bad_config("config_groups", config, "groups of layers")
    return [_read_group(group) for group in config.values()]


def _read_group(group: Any) -> LayerGroup:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise _bad_config("config_groups", group, "a group with weights")
    targets, block = group.get("targets"), weights.get("block_structure")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise _bad_config("targets", targets, "names of layers")
    for target in targets:
        try:
            re.compile(target.removeprefix("re:"))
        except re.error:
            raise _bad_config("targets", target, "a regular expression") from None
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    ):
        raise _bad_config("block_structure", block, "two whole numbers above 0")
    return LayerGroup(
        tuple(targets),
        whole_number(weights, "num_bits", 8),
        read_group_size(weights, -1),
        weights.get("symmetric", True) is not False,
        _rounds_inputs(group.get("input_activations")),
        None if block is None else (block[0], block[1]),
    )


def _rounds_inputs(declared: Any) -> bool:
    wanted = {"num_bits": 8, "type": "int", "dynamic": True}
    return isinstance(declared, dict) and wanted.items() <= declared.items()


def _bad_config(key: str, value: Any, wanted: str) -> QuireError:
    what = f"{key} of quantization_config in config.json is {value!r:.80}, but must be {wanted}."
    return QuireError("bad_config", what, "Check config.json.")


def _target_matches(target: str, layer: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), layer) is not None
    return target == layer


def _group_of(layer: str, groups: list[LayerGroup]) -> LayerGroup:
    named = next((group for group in groups if group.matches(layer)), None)
    group = named or next((group for group in groups if group.targets_classes), None)
    if group is None:
        raise bad_weights(f"{layer} is packed, but no group of config.json names it")
    return group


def _words(prefix: str, entries: Entries, group: LayerGroup) -> GroupedMatrix:
    bits = group.bits
    if bits not in BITS:
        raise unsupported(f"{prefix} is packed with {bits} bits, which is not supported")
    weight = check_entry(entries, f"{prefix}.weight_packed", ("I32",))
    scales = check_entry(entries, f"{prefix}.weight_scale", FLOATS)
    if len(weight.shape) != 2 or len(scales.shape) != 2 or not scales.shape[1]:
        raise bad_weights(f"{prefix}.weight_packed and weight_scale are {list(weight.shape)} and {list(scales.shape)}")
    rows, words = weight.shape
    columns, groups = words * 32 // bits, scales.shape[1]
    size = group_size(f"{prefix}.weight_scale", columns, groups, group.size)
    check_entry(entries, f"{prefix}.weight_scale", FLOATS, (rows, groups))
    names = [f"{prefix}.{end}" for end in ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx")]
    if not group.is_symmetric:
        check_entry(entries, names[2], ("I32",), (-(-rows * bits // 32), groups))
    has_order = names[3] in entries
    if has_order:
        check_entry(entries, names[3], ("I32", "I64"), (columns,))

    def take(stored: StoredTensors, first: int, count: int) -> Grouped:
        numbers = unpack_bits(stored.rows(names[0], first, count), bits)
        zeros: Tensor | int = 1 << (bits - 1)
        if not group.is_symmetric:
            zeros = unpack_bits(stored.whole(names[2]).t(), bits).t()[first : first + count]
        of_column = read_order(names[3], stored, groups) if has_order else size
        return Grouped(numbers, stored.rows(names[1], first, count), zeros, of_column)

    kind = grouped_kind(
        f"packed INT{bits}", bits, None if has_order else size, columns, has_zeros=not group.is_symmetric
    )
    uses = [name for name in (*names, f"{prefix}.weight_shape") if name in entries]
    return GroupedMatrix((rows, columns), tuple(uses), kind, take)


def _bytes(prefix: str, entries: Entries, groups: list[LayerGroup]) -> Packed:
    """Describes a signed eight-bit matrix. It is decoded as unsigned with 128 added, as the other formats are."""
    weight = check_entry(entries, f"{prefix}.weight", ("I8",))
    if len(weight.shape) != 2:
        raise bad_weights(f"{prefix}.weight is I8 {list(weight.shape)}, which is not a matrix")
    rows, columns = weight.shape
    names = [f"{prefix}.{end}" for end in ("weight", "weight_scale", "weight_zero_point")]
    scales = check_entry(entries, names[1], FLOATS)
    shape = (*scales.shape, 1, 1)[: max(2, len(scales.shape))]  # trailing dimensions of size 1 are optional
    if len(shape) != 2 or shape[0] not in (1, rows) or columns % shape[1]:
        raise bad_weights(
            f"{names[1]} is {list(scales.shape)}, where {list(weight.shape)} needs one for each row or group"
        )
    has_zeros = names[2] in entries
    if has_zeros:
        check_entry(entries, names[2], ("I8",), scales.shape)

    def take(stored: StoredTensors, first: int, count: int) -> Grouped:
        numbers = stored.rows(names[0], first, count).view(torch.uint8) ^ 128

        def spread(name: str) -> Tensor:
            return stored.whole(name).reshape(shape).expand(rows, -1)[first : first + count].contiguous()

        zeros: Tensor | int = spread(names[2]).view(torch.uint8) ^ 128 if has_zeros else 128
        return Grouped(numbers, spread(names[1]), zeros, columns // shape[1])

    uses = tuple(names if has_zeros else names[:2])
    if groups and shape == (rows, 1) and not has_zeros and _group_of(prefix, groups).rounds_inputs:
        return W8A8Matrix((rows, columns), uses)
    kind = grouped_kind("INT8 with zeros", 8, columns // shape[1], columns, has_zeros)
    return GroupedMatrix((rows, columns), uses, kind, take)


@dataclass(frozen=True, slots=True)
class W8A8Matrix:
    """Signed bytes with a scale for each row, whose activations are to be rounded to bytes, too."""

    shape: tuple[int, ...]
    uses: tuple[str, ...]  # the matrix and its scales
    kind: str = "W8A8"

    def decode(self, stored: StoredTensors, first: int, count: int) -> Tensor:
        return stored.rows(self.uses[0], first, count).float() * self._scales(stored)[first : first + count]

    def blocks(self, stored: StoredTensors) -> tuple[str, Tensor]:
        """Returns the rows as the native library reads them: a row's bytes, then its scale in float32."""
        matrix = stored.whole(self.uses[0]).view(torch.uint8)
        return "W8A8", torch.cat((matrix, self._scales(stored).view(torch.uint8)), 1).view(-1)

    def _scales(self, stored: StoredTensors) -> Tensor:
        """Returns the rows' scales, [rows, 1] float32."""
        return stored.whole(self.uses[1]).reshape(-1, 1).float().contiguous()
