"""Which type each tensor of the result has.

A target is a GGUF mix (Q4_K_M: most matrices in Q4_K, sensitive ones in Q6_K) or a compressed-tensors scheme. `--keep`
overrides it for the tensors that a pattern matches, and a type whose blocks do not fit a matrix gives way to one whose
blocks do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from quire.kernels.formats.gguf_blocks import FORMATS
from quire.quantize.source import TensorFacts
from quire.types import QuireError

Container = Literal["gguf", "compressed"]
# A matrix whose columns do not make blocks of 256 gets the type in blocks of 32 that is next in size.
_NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_0", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}


@dataclass(frozen=True, slots=True)
class QuantTarget:
    """What a target name stands for."""

    name: str
    container: Container
    usual: str  # type of most matrices
    better: str = ""  # type of sensitive ones: values, and projections back into the residual stream
    tables: str = ""  # type of embedding and head; empty: not quantized
    file_type: int = 0  # number of a GGUF file's kind
    bits: float = 0.0  # a weight's, with its share of the scales

    @property
    def title(self) -> str:
        return self.name


TARGETS: dict[str, QuantTarget] = {
    target.name: target
    for target in (
        QuantTarget("Q8_0", "gguf", "Q8_0", "Q8_0", "Q8_0", 7),
        QuantTarget("Q6_K", "gguf", "Q6_K", "Q6_K", "Q6_K", 18),
        QuantTarget("Q5_K_M", "gguf", "Q5_K", "Q6_K", "Q6_K", 17),
        QuantTarget("Q4_K_M", "gguf", "Q4_K", "Q6_K", "Q6_K", 15),
        QuantTarget("Q4_0", "gguf", "Q4_0", "Q4_0", "Q6_K", 2),
        QuantTarget("IQ4_XS", "gguf", "IQ4_XS", "Q5_K", "Q6_K", 30),
        QuantTarget("BF16", "gguf", "BF16", "BF16", "BF16", 32),
        QuantTarget("F16", "gguf", "F16", "F16", "F16", 1),
        QuantTarget("FP8", "compressed", "FP8"),
        QuantTarget("INT8", "compressed", "INT8"),
        QuantTarget("W4A16", "compressed", "W4A16"),
        QuantTarget("NVFP4", "compressed", "NVFP4"),
        QuantTarget("MXFP4", "compressed", "MXFP4"),
    )
}
ALIASES = {"W8A8": "INT8", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "INT4": "W4A16"}
COMPRESSED_BLOCKS = {"FP8": 1, "INT8": 1, "W4A16": 32, "NVFP4": 16, "MXFP4": 32}  # columns that must not be cut
FLOAT_TYPES = ("F32", "F16", "BF16")
_SENSITIVE = re.compile(r".*(v_proj|qkv_proj|query_key_value|down_proj|w2|fc2|dense_4h_to_h|out_proj)(\.weight)?")
_VALUES = re.compile(r".*(v_proj|qkv_proj|query_key_value)(\.weight)?")


@dataclass(frozen=True, slots=True)
class Recipe:
    """The type of each tensor."""

    target: QuantTarget
    keep: tuple[tuple[str, str], ...] = ()  # (pattern of tensor names, type); the first match counts
    chosen: Mapping[str, str] | None = None  # types chosen for a size in bits

    def type_of(self, tensor: TensorFacts) -> str:
        """Returns a GGUF type or a compressed-tensors scheme; F32 for what is not quantized."""
        if not tensor.is_quantizable:
            return "F32"
        named = next((kind for pattern, kind in self.keep if re.search(pattern, tensor.name)), None)
        if named is not None:
            return self._fit_named(tensor, named)
        if self.chosen is not None and tensor.name in self.chosen:
            return self.chosen[tensor.name]
        return fit(self._usual(tensor), tensor.columns)

    def _usual(self, tensor: TensorFacts) -> str:
        target = self.target
        if tensor.role in ("table", "head"):
            return target.tables or "BF16"
        if target.better and target.better != target.usual and _is_sensitive(tensor):
            return target.better
        return target.usual

    def _fit_named(self, tensor: TensorFacts, kind: str) -> str:
        if fit(kind, tensor.columns) != kind:
            what = f"{tensor.name} has {tensor.columns} columns, which do not make whole blocks of {kind}."
            raise QuireError("invalid_parameter", what, "Choose another type for it.", param="keep")
        return kind


def _is_sensitive(tensor: TensorFacts) -> bool:
    """Returns whether a matrix gets more bits: values and projections back, in the first and the last eighth of the
    layers and in every third between.
    """
    if tensor.layer is None or not _SENSITIVE.fullmatch(tensor.name):
        return False
    eighth = tensor.num_layers // 8
    return (
        tensor.layer < eighth
        or tensor.layer >= tensor.num_layers - eighth
        or (tensor.layer - eighth) % 3 == 2
        or (tensor.num_layers < 8 and bool(_VALUES.fullmatch(tensor.name)))
    )


def fit(kind: str, columns: int) -> str:
    """Returns the type, or the one that takes its place where the columns are not whole blocks of it."""
    if kind in COMPRESSED_BLOCKS:
        return kind if columns % COMPRESSED_BLOCKS[kind] == 0 else "BF16"
    if columns % FORMATS[kind].elements == 0:
        return kind
    narrow = _NARROW.get(kind, "F16")
    return narrow if columns % FORMATS[narrow].elements == 0 else "F16"


def find_target(name: str) -> QuantTarget:
    called = name.upper().replace("-", "_")
    target = TARGETS.get(ALIASES.get(called, called))
    if target is None:
        known = ", ".join(TARGETS)
        raise QuireError("invalid_parameter", f"There is no type {name!r} to quantize to.", f"Choose one of {known}.")
    return target


def read_keep(words: list[str], container: Container) -> tuple[tuple[str, str], ...]:
    """Reads `REGEX=TYPE` words."""
    known = set(COMPRESSED_BLOCKS) | {"BF16"} if container == "compressed" else set(ENCODABLE)
    found = []
    for word in words:
        pattern, _, kind = word.rpartition("=")
        kind = kind.upper()
        try:
            re.compile(pattern)
        except re.error as error:
            what = f"--keep {word}: {pattern!r} is not a regular expression ({error})."
            raise QuireError("invalid_parameter", what, "Write REGEX=TYPE.", param="keep") from None
        if not pattern or kind not in known:
            what = f"--keep {word} does not name a pattern and a type."
            raise QuireError("invalid_parameter", what, f"Write REGEX=TYPE, with one of {', '.join(sorted(known))}.")
        found.append((pattern, kind))
    return tuple(found)


ENCODABLE = ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q5_0", "Q4_K", "Q4_0", "Q4_1", "IQ4_NL", "IQ4_XS")
LADDER = ("IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0")  # types that --target-bpw chooses from, by size


def type_bits(kind: str) -> float:
    """Returns the bits of a weight in a GGUF type."""
    form = FORMATS[kind]
    return 8 * form.num_bytes / form.elements


def choose_types(
    tensors: list[TensorFacts], bits: float, error_of: Callable[[TensorFacts, str], float], tables: str
) -> dict[str, str]:
    """Returns the type of each matrix, so that all of them together have at most `bits` a weight.

    Starts from the smallest type for every matrix, then upgrades the one whose error falls most per added bit.
    `error_of`: a matrix and a type -> what the error costs.
    """
    matrices = [tensor for tensor in tensors if tensor.is_quantizable]
    chosen, errors, room = {}, {}, 0.0
    for tensor in matrices:
        size = _size(tensor)
        kind = fit(tables if tensor.role != "linear" else LADDER[0], tensor.columns)
        chosen[tensor.name] = kind
        room += size * (bits - type_bits(kind))
    if room < 0:
        least = sum(type_bits(chosen[t.name]) * _size(t) for t in matrices) / sum(map(_size, matrices))
        what = f"{bits} bits a weight are too few: the smallest types take {least:.2f} here."
        raise QuireError("invalid_parameter", what, "Give a larger --target-bpw.", param="target_bpw")

    def gain(tensor: TensorFacts, kind: str) -> float:
        key = (tensor.name, kind)
        if key not in errors:
            errors[key] = error_of(tensor, kind)
        return errors[key]

    linears = [tensor for tensor in matrices if tensor.role == "linear"]
    while True:
        best: tuple[float, TensorFacts, str, float] | None = None
        for tensor in linears:
            now = chosen[tensor.name]
            for kind in (fit(kind, tensor.columns) for kind in LADDER):
                more = (type_bits(kind) - type_bits(now)) * _size(tensor)
                if not 0 < more <= room:
                    continue
                worth = (gain(tensor, now) - gain(tensor, kind)) / more
                if worth > 0 and (best is None or worth > best[0]):
                    best = worth, tensor, kind, more
        if best is None:
            return chosen
        _, tensor, kind, more = best
        chosen[tensor.name] = kind
        room -= more


def _size(tensor: TensorFacts) -> int:
    size = 1
    for length in tensor.shape:
        size *= length
    return size
