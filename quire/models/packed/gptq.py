"""GPTQ: `X.qweight`, `X.scales`, `X.qzeros` and `X.g_idx`, packed along a layer's inputs. AutoRound writes the same.
The config's settings for single layers are not needed: a layer's tensors determine its bits.
"""

from __future__ import annotations

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
from quire.models.weight_errors import bad_weights

BITS = (2, 3, 4, 8)
# Format -> how much smaller than a zero point its stored value is.
FORMATS = {"gptq": 1, "gptq_v2": 0}
AUTO_ROUND = {"auto_round": "gptq_v2", "auto_round:gptqmodel": "gptq_v2", "auto_round:auto_gptq": "gptq"}


@dataclass(frozen=True, slots=True)
class GptqConfig:
    """GPTQ's fields of `quantization_config`."""

    bits: int  # for layers whose tensors do not determine it
    group_size: int  # inputs that share a scale; -1: all inputs of a layer
    in_order: bool  # inputs of a group are consecutive
    is_symmetric: bool  # symmetric: every zero point is the middle of the range
    zero_offset: int  # difference between a zero point and its stored value


def find_gptq(config: Mapping[str, Any]) -> Finder:
    form = str(config.get("checkpoint_format") or config.get("format") or "gptq")
    form = AUTO_ROUND.get(str(config.get("packing_format")), form)
    if form not in FORMATS:
        raise unsupported(f"This checkpoint has the GPTQ format {form!r}, which is not supported")
    read = GptqConfig(
        whole_number(config, "bits", 4),
        read_group_size(config, 128),
        not config.get("desc_act", False),
        config.get("sym", True) is not False,
        FORMATS[form],
    )

    def find(entries: Entries, _: Callable[[str], Tensor]) -> dict[str, Packed]:
        prefixes = [name.removesuffix(".qweight") for name in entries if name.endswith(".qweight")]
        return {f"{prefix}.weight": _find_one(prefix, entries, read) for prefix in prefixes}

    return find


def _find_one(prefix: str, entries: Entries, config: GptqConfig) -> GroupedMatrix:
    weight = check_entry(entries, f"{prefix}.qweight", ("I32",))
    order = check_entry(entries, f"{prefix}.g_idx", ("I32", "I64")) if f"{prefix}.g_idx" in entries else None
    if len(weight.shape) != 2 or (order is not None and len(order.shape) != 1):
        raise bad_weights(f"{prefix}.qweight is {list(weight.shape)}, or its g_idx has more than one dimension")
    words, rows = weight.shape
    columns = words * 32 // config.bits if order is None else order.shape[0]
    bits = words * 32 // columns if columns else 0
    if bits not in BITS or words * 32 != columns * bits:
        raise bad_weights(
            f"{prefix}.qweight is {list(weight.shape)}, which does not hold {columns} inputs of 2, 3, 4 or 8 bits"
        )
    scales = check_entry(entries, f"{prefix}.scales", FLOATS)
    groups = scales.shape[0] if scales.shape else 0
    group = group_size(f"{prefix}.scales", columns, groups, config.group_size)
    check_entry(entries, f"{prefix}.scales", FLOATS, (groups, rows))
    check_entry(entries, f"{prefix}.qzeros", ("I32",), (groups, rows * bits // 32))
    names = [f"{prefix}.{end}" for end in ("qweight", "scales", "qzeros", *(["g_idx"] if order else []))]
    kept = group if config.in_order else None
    kind = grouped_kind("GPTQ", bits, kept, columns, has_zeros=not config.is_symmetric)

    def take(stored: StoredTensors, first: int, count: int) -> Grouped:
        numbers = unpack_bits(stored.columns(names[0], first, count).t(), bits)
        scales = stored.columns(names[1], first, count).t()
        written = unpack_bits(stored.whole(names[2]), bits)[:, first : first + count].t()
        zeros = _zeros(names[2], written, bits, config)
        of_column = None if order is None else read_order(names[3], stored, groups)
        if of_column is not None and config.in_order:
            if not torch.equal(of_column, torch.arange(columns, device=stored.device) // group):
                raise bad_weights(f"{names[3]} reorders inputs, although config.json has desc_act false")
            of_column = None
        return Grouped(numbers, scales, zeros, group if of_column is None else of_column)

    return GroupedMatrix((rows, columns), tuple(names), kind, take)


def _zeros(name: str, written: Tensor, bits: int, config: GptqConfig) -> Tensor | int:
    """Returns the zero points. In a symmetric checkpoint either stored form of the middle is accepted: other readers
    ignore the field then, so published files have both.
    """
    middle = 1 << (bits - 1)
    if not config.is_symmetric:
        return (written + config.zero_offset).bitwise_and_((1 << bits) - 1)
    if not bool(((written == middle) | (written == middle - 1)).all()):
        raise bad_weights(f"{name} has zero points other than {middle}, although config.json has sym true")
    return middle
