"""AWQ: `X.qweight`, `X.scales` and `X.qzeros`, packed along a layer's outputs, eight to a 32-bit word in an interleaved
order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
    unsupported,
    whole_number,
)
from quire.models.weight_errors import bad_weights

BITS = 4
PER_WORD = 32 // BITS
WORD_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # position within a word of each of eight consecutive outputs


def find_awq(config: Mapping[str, Any]) -> Finder:
    version = str(config.get("version") or "gemm").lower()
    if version != "gemm":
        raise unsupported(f"This checkpoint is in AWQ's version {version!r}, which is not supported")
    bits = whole_number(config, "bits", BITS)
    if bits != BITS:
        raise unsupported(f"This checkpoint is in AWQ with {bits} bits, which is not supported")

    declared = read_group_size(config, 128)

    def find(entries: Entries, _: Callable[[str], Tensor]) -> dict[str, Packed]:
        prefixes = [name.removesuffix(".qweight") for name in entries if name.endswith(".qweight")]
        return {f"{prefix}.weight": _find_one(prefix, entries, declared) for prefix in prefixes}

    return find


def _find_one(prefix: str, entries: Entries, declared: int) -> GroupedMatrix:
    weight = check_entry(entries, f"{prefix}.qweight", ("I32",))
    scales = check_entry(entries, f"{prefix}.scales", FLOATS)
    if len(weight.shape) != 2 or len(scales.shape) != 2 or not weight.shape[0] or not scales.shape[0]:
        raise bad_weights(
            f"{prefix}.qweight and scales are {list(weight.shape)} and {list(scales.shape)}, which is not a valid layer"
        )
    columns, words = weight.shape
    rows, groups = words * PER_WORD, scales.shape[0]
    group = group_size(f"{prefix}.scales", columns, groups, declared)
    check_entry(entries, f"{prefix}.scales", FLOATS, (groups, rows))
    uses = [f"{prefix}.qweight", f"{prefix}.scales"]
    if f"{prefix}.qzeros" in entries:
        check_entry(entries, f"{prefix}.qzeros", ("I32",), (groups, words))
        uses.append(f"{prefix}.qzeros")

    def unpack(packed: Tensor, skip: int, count: int) -> Tensor:
        """Unpacks [n, words] int32 into [count, n]: the outputs after the first `skip` in these words."""
        numbers = unpack_bits(packed, BITS).unflatten(1, (-1, PER_WORD))[:, :, WORD_ORDER].flatten(1)
        return numbers[:, skip : skip + count].t().contiguous()

    def take(stored: StoredTensors, first: int, count: int) -> Grouped:
        word, skip = divmod(first, PER_WORD)
        num_words = -(-(skip + count) // PER_WORD)
        numbers = unpack(stored.columns(uses[0], word, num_words), skip, count)
        zeros = unpack(stored.columns(uses[2], word, num_words), skip, count) if len(uses) > 2 else 1 << (BITS - 1)
        return Grouped(numbers, stored.columns(uses[1], first, count).t(), zeros, group)

    kind = grouped_kind("AWQ", BITS, group, columns, has_zeros=len(uses) > 2)
    return GroupedMatrix((rows, columns), tuple(uses), kind, take)
