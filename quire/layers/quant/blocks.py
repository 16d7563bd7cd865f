"""The scheme of the native CPU kernels: weights in their checkpoint's quantized blocks, or quantized while loading.

Matrices are packed into tiles once. Activations are rounded to 16 bits inside a product. The few GGUF types without
kernels (grids and ternary blocks) are requantized to Q8_0, without a measurable loss, and a warning is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.kernels.activations import Curve
from quire.kernels.formats.gguf_blocks import FORMATS
from quire.kernels.formats.packed_ints import GROUPED
from quire.kernels.formats.random_blocks import random_blocks
from quire.kernels.native.library import BLOCK, FORMS, Native, unit_columns
from quire.kernels.native.matrix import PackedLinear, PackedMatrix, matrix_bytes, pack_blocks, pack_floats
from quire.kernels.table import Ops
from quire.layers.quant.dense import Dense
from quire.layers.weights import Part, PartSource, Weight

if TYPE_CHECKING:
    from quire.layers.linear import Linear
    from quire.layers.norm import RMSNorm

log = logging.getLogger("quire")
FROM_FLOATS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "W8A8")  # types that the library can quantize floats to
QUANTS = {"q8_0": "Q8_0", "q4_0": "Q4_0", "int8": "W8A8"}  # a value of `--quant` -> type
MAX_BYTE_COLUMNS = 1 << 16  # of W8A8: more products of bytes might not fit into a sum of 32 bits
_FLOATS = ("F32", "F16", "BF16", "F64")


class QuantizedBlocks:
    """Selects the type of every matrix and packs it for the native library."""

    def __init__(self, ops: Ops, *, types: Mapping[str, str], floats: str, quant: str | None = None):
        """`types`: GGUF type, or other packed type, of each checkpoint tensor whose blocks are kept. `floats`: type of
        all other matrices (F32 or F16). `quant`: type that all matrices are quantized to instead, of `QUANTS`.
        """
        assert ops.native is not None
        self.ops = ops
        self.native = ops.native
        self._types, self._floats, self._quant = types, floats, quant
        self._replaced: set[str] = set()

    @property
    def quantizes(self) -> bool:
        return self._quant is not None

    @property
    def floats(self) -> str:
        return self._floats

    def create(self, linear: Linear, sources: list[tuple[str, int]], has_bias: bool, dtype: torch.dtype) -> None:
        Dense(self.ops).create(linear, sources, has_bias, dtype)
        weight = linear.weight
        assert isinstance(weight, Weight)
        weight.packing = _Packing(self, is_table=any(_is_table(prefix) for prefix, _ in sources))

    def pack_table(self, weight: Weight) -> None:
        """Packs an embedding like a head, so that a tied one is stored once."""
        weight.packing = _Packing(self, is_table=True)

    def pack_experts(self, weight: Weight, num_experts: int) -> None:
        """Packs one kind of matrix of all experts: one matrix per expert, or two if gate and up are separate."""
        weight.packing = _Packing(self, is_table=False, num_entries=num_experts)

    def finish(self, linear: Linear) -> None:
        matrices: list[PackedMatrix] = linear.weight  # type: ignore[assignment]
        linear.packed = PackedLinear(matrices, linear.bias)  # type: ignore[assignment]

    def apply(
        self, linear: Linear, x: Tensor, norm: RMSNorm | None, gate: Curve | None, residual: Tensor | None
    ) -> Tensor:
        packed: PackedLinear = linear.packed  # type: ignore[assignment]
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        out = packed(x, norm_weight=weight, eps=eps, residual=residual if gate is None else None)
        if gate is not None:
            out = self.ops.gate_mul(out, gate)
            out = out if residual is None else out.add_(residual)
        return out

    def forms(self, weight: Weight, packing: _Packing) -> list[tuple[str, int]]:
        """Returns type and number of rows of each matrix of the weight.

        It depends on the parts' forms, which layers set after the weight is created, so it is computed on demand.
        """
        parts = weight.parts_in(self._types)
        forms = [(self._form(part, weight.shape[1], packing.is_table), part.stop - part.start) for part in parts]
        if len(parts) == 1 and packing.num_entries > 1:
            form, rows = forms[0]
            return [(form, rows // packing.num_entries)] * packing.num_entries
        return forms

    def _form(self, part: Part, columns: int, is_table: bool) -> str:
        kind = self._types.get(part.name, self._floats)
        if kind in GROUPED:  # values that a form changes no longer fit the original groups
            kind = GROUPED[kind] if part.keeps_rows else "Q8_0"
        if self._quant is not None:
            form = "Q8_0" if is_table else self._quant  # four bits are too few for a table that affects every logit
        elif kind in _FLOATS:
            form = kind if kind in FORMS else "F32"
        elif kind in FORMS and (part.keeps_rows or kind in FROM_FLOATS):
            form = kind
        else:  # also values that a form changes, which no longer fit the original blocks
            form = "Q8_0"
            if kind not in FORMS:
                self._say_once(kind)
        if form == "W8A8" and columns > MAX_BYTE_COLUMNS:
            form = "Q8_0"
        return form if columns % unit_columns(form) == 0 else self._floats

    def _say_once(self, kind: str) -> None:
        if kind not in self._replaced:
            self._replaced.add(kind)
            log.warning("No CPU kernel reads %s: tensors of this type are requantized to Q8_0.", kind)


@dataclass(frozen=True, slots=True)
class _Packing:
    """Packs one weight with its scheme."""

    scheme: QuantizedBlocks = field(compare=False)
    is_table: bool  # an embedding or a head
    num_entries: int = 1  # matrices that the weight stacks

    def num_bytes(self, weight: Weight) -> int:
        columns, native = weight.shape[1], self.scheme.native
        return sum(matrix_bytes(native, form, rows, columns) for form, rows in self.scheme.forms(weight, self))

    def pack(self, weight: Weight, sources: list[PartSource]) -> list[PackedMatrix]:
        if len(sources) == 1 and self.num_entries > 1:
            sources = sources[0].split(self.num_entries)
        forms = [form for form, _ in self.scheme.forms(weight, self)]
        # A checkpoint may have the same rows in a different number of tensors.
        forms = forms if len(sources) == len(forms) else forms[:1] * len(sources)
        return [_pack(self.scheme.native, form, source) for form, source in zip(forms, sources, strict=True)]


@dataclass(frozen=True, slots=True)
class Unquantized:
    """The matrices that `quant` leaves as floats, because their columns are not a multiple of the block size."""

    names: tuple[str, ...]  # of checkpoint tensors
    widths: tuple[int, ...]  # distinct numbers of columns, ascending
    form: str  # type they are stored in: F32 or F16
    num_matrices: int  # in the whole model, including quantized ones

    @property
    def is_all(self) -> bool:
        return len(self.names) == self.num_matrices


def find_unquantized(weights: Iterable[Weight]) -> Unquantized | None:
    """Returns the matrices left as floats; None if there are none or if the model is not quantized while loading."""
    packed = [weight for weight in weights if isinstance(weight.packing, _Packing) and weight.packing.scheme.quantizes]
    names = {part.name: weight for weight in packed for part in weight.parts}
    left = {name: weight.shape[1] for name, weight in names.items() if weight.shape[1] % BLOCK}
    if not left:
        return None
    form = next(weight.packing.scheme.floats for weight in packed if isinstance(weight.packing, _Packing))
    return Unquantized(tuple(left), tuple(sorted(set(left.values()))), form, len(names))


def _pack(native: Native, form: str, source: PartSource) -> PackedMatrix:
    rows, columns = source.shape
    blocks = source.blocks if source.type_name == form else None
    if blocks is None and form not in FROM_FLOATS:  # random weights; tensors from a file have blocks in this case
        seed = int(source.read(0, 1).abs().sum().item() * 1e6)
        blocks = random_blocks(form, rows * columns // FORMATS[form].elements, torch.Generator().manual_seed(seed))
    if blocks is not None:
        return pack_blocks(native, form, rows, columns, blocks, source.order)
    return pack_floats(native, form, rows, columns, source.read)


def _is_table(prefix: str) -> bool:
    return prefix.endswith(("embed_tokens", "embeddings", "lm_head"))
