"""Reads a LoRA adapter from a GGUF file, as llama.cpp's converter writes it, under the checkpoint's names."""

from __future__ import annotations

from torch import Tensor

from quire.files.adapters import AdapterFiles
from quire.files.gguf import GGUFFile, open_gguf
from quire.models.adapters.tensors import LoraTensors, Pair
from quire.models.gguf.checkpoint import is_permuted, read_rows, unpermute
from quire.models.gguf.tensor_names import hf_name, style_of
from quire.types import QuireError


def read_gguf_adapter(files: AdapterFiles, head_dim: int | None) -> LoraTensors:
    """Returns the adapter's tensors. `head_dim`: of the model, whose heads some converters permute."""
    file = open_gguf(files.path)
    kinds = file.metadata.get("general.type"), file.metadata.get("adapter.type")
    alpha = file.metadata.get("adapter.lora.alpha")
    if kinds != ("adapter", "lora") or not isinstance(alpha, int | float):
        what = f"{files.path} is not a LoRA adapter: its type is {kinds[0]!r}, {kinds[1]!r}."
        raise QuireError("bad_adapter", what, "Convert the adapter with convert_lora_to_gguf.py.", "adapter")
    style = style_of(file.metadata.get("general.architecture"))
    found = LoraTensors()
    for name, tensor in file.tensors.items():
        stem, _, which = name.rpartition(".lora_")
        if which not in ("a", "b"):
            what = f"{files.path} is not a usable adapter: it holds the tensor {name}."
            raise QuireError("bad_adapter", what, "Convert it again.", "adapter")
        called = hf_name(stem, style)
        matrix = read_rows(tensor, 0, tensor.shape[0])
        module = called.removesuffix(".weight")
        pair = found.pairs.setdefault(module, Pair(is_embedding=stem == "token_embd.weight"))
        if which == "a":  # an embedding's is stored by token
            pair.a = matrix.t() if pair.is_embedding else matrix
        else:
            pair.b = _in_order(file, called, matrix, head_dim)
    for module, pair in found.pairs.items():
        rank = pair.b.shape[1] if pair.b is not None and pair.b.dim() == 2 else 1
        found.scales[module] = float(alpha) / max(rank, 1) if alpha else 1.0
    return found


def _in_order(file: GGUFFile, name: str, rows: Tensor, head_dim: int | None) -> Tensor:
    """Returns the rows of a query or key matrix in the checkpoint's order."""
    if not is_permuted(file, name):
        return rows
    if head_dim is None or rows.shape[0] % head_dim:
        what = f"{file.path} does not fit this model: {name} has {rows.shape[0]} rows, a head has {head_dim}."
        raise QuireError("adapter_mismatch", what, "Load it beside the model that it was trained on.", "adapter")
    return unpermute(rows, head_dim)
