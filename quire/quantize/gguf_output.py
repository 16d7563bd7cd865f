"""Writes GGUF files: tensors in blocks, and the metadata of another GGUF file or of a Hugging Face checkpoint.

The `gguf` package writes the container. Matrices are encoded here, one at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.files.ggml_types import GGMLType
from quire.kernels.formats.gguf_encode import quantize
from quire.models.gguf.checkpoint import read_rows
from quire.models.gguf.tensor_names import hf_name, style_of
from quire.quantize.gguf_conversion import convert_metadata, convert_tensors
from quire.quantize.parts import Parts, naming_full_disks
from quire.quantize.recipe import Recipe
from quire.quantize.source import SourceModel, TensorFacts
from quire.types import QuireError

ROWS_ELEMENTS = 1 << 24  # elements decoded and encoded at a time


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor of the result and how its floats are read."""

    name: str  # in the GGUF file
    facts: TensorFacts
    read: Any  # (first row, number of rows) -> [rows, ...] float32


def need_gguf() -> Any:
    """Returns the `gguf` package."""
    try:
        import gguf
    except ImportError:
        what = "Writing a GGUF file needs the Python package gguf."
        raise QuireError("missing_package", what, 'Install it: pip install "quire[quantize]"') from None
    return gguf


def list_tensors(source: SourceModel) -> list[OutputTensor]:
    """Returns the tensors of the result, in the order of the file."""
    if source.file is None:
        return [OutputTensor(name, facts, read) for name, facts, read in convert_tensors(source)]
    style = style_of(source.file.metadata["general.architecture"])
    found = []
    for name, tensor in source.file.tensors.items():

        def read(first: int, count: int, tensor: Any = tensor) -> Tensor:
            return read_rows(tensor, first, count)

        found.append(OutputTensor(name, source.facts(hf_name(name, style), tensor.shape), read))
    return found


def write_gguf(
    source: SourceModel, recipe: Recipe, importance: Mapping[str, Tensor], parts: Parts, out: Path, on_bytes: Any
) -> dict[str, str]:
    """Writes the file and returns the type of each tensor by its GGUF name."""
    gguf = need_gguf()
    tensors = list_tensors(source)
    types = {tensor.name: recipe.type_of(tensor.facts) for tensor in tensors}
    done = 0
    for tensor in tensors:
        parts.keep(tensor.name, partial(_parts_of, tensor, types[tensor.name], importance))
        done += 4 * int(np.prod(tensor.facts.shape))
        on_bytes(done)
    unfinished = out.with_name(f"{out.name}.new")
    with naming_full_disks(out):
        try:
            arch, metadata = _metadata(source, gguf)
            writer = gguf.GGUFWriter(unfinished, arch)
            for key, (value, kind, sub_type) in metadata.items():
                writer.add_key_value(key, value, kind, sub_type=sub_type)
            writer.add_file_type(recipe.target.file_type)
            writer.add_quantization_version(2)
            for tensor in tensors:
                form = GGMLType[types[tensor.name]]
                shape = [*tensor.facts.shape[:-1], form.num_bytes(tensor.facts.columns)]
                dtype = gguf.GGMLQuantizationType[types[tensor.name]]
                writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), int(np.prod(shape)), raw_dtype=dtype)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in tensors:
                data = parts.tensors(tensor.name, dict)["data"]
                writer.write_tensor_data(data.numpy())
            writer.close()
            os.replace(unfinished, out)
        finally:
            unfinished.unlink(missing_ok=True)
    return types


def _parts_of(tensor: OutputTensor, kind: str, importance: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"data": _encode(tensor, kind, importance)}


def _encode(tensor: OutputTensor, kind: str, importance: Mapping[str, Tensor]) -> Tensor:
    """Returns a tensor's blocks, [bytes] uint8."""
    shape = tensor.facts.shape
    weights = importance.get(tensor.facts.name)
    weights = None if weights is None or len(weights) != shape[-1] else weights
    row = int(np.prod(shape[1:]))
    step = max(1, ROWS_ELEMENTS // row)
    found = []
    for first in range(0, shape[0], step):
        rows = tensor.read(first, min(step, shape[0] - first)).reshape(-1, shape[-1])
        found.append(quantize(rows, kind, weights))
    return torch.cat(found)


Field = tuple[Any, Any, Any]  # value, type, type of an array's items


def _metadata(source: SourceModel, gguf: Any) -> tuple[str, dict[str, Field]]:
    """Returns the architecture and the fields of the result, without those that the quantization sets."""
    if source.file is None:
        return convert_metadata(source, gguf)
    fields = dict(_fields(source.files.path, gguf))
    own = ("general.file_type", "general.quantization_version", "general.architecture")
    return str(fields["general.architecture"][0]), {
        key: field for key, field in fields.items() if key not in own and not key.startswith("split.")
    }


def _fields(path: Path, gguf: Any) -> Iterator[tuple[str, Field]]:
    """Yields the metadata of a file with its types."""
    for field in gguf.GGUFReader(path).fields.values():
        if not field.name.startswith("GGUF."):
            kind = field.types[0]
            yield field.name, (field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
