"""Reads an adapter's tensors and brings them to the weights of a model.

Every name and shape is checked before the adapter is used: one that was trained on another model is refused by the
first matrix that does not fit. `runtime.adapters` calls `load_adapter`.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from quire.files.adapters import AdapterFiles, LoraConfig
from quire.files.safetensors import check_safetensors
from quire.layers.adapters import Adapter, LowRank, Replaced
from quire.models.adapters.from_gguf import read_gguf_adapter
from quire.models.adapters.places import Place, Places
from quire.models.adapters.tensors import LoraTensors, Pair
from quire.types import QuireError

_PREFIX = "base_model.model."
_LORA = re.compile(r"(.+?)\.lora_(embedding_)?([AB])(?:\.weight)?")
MAX_NAMED = 3


def load_adapter(files: AdapterFiles, places: Places, *, dtype: torch.dtype, max_rank: int) -> Adapter:
    """Returns the adapter for the model of these places, its tensors in `dtype`."""
    if places.is_empty:
        what = "A model that runs through transformers takes no adapters."
        raise QuireError("unsupported_adapter", what, "Merge the adapter into the weights.", "adapter")
    if files.config is None:
        tensors = read_gguf_adapter(files, places.head_dim)
    else:
        tensors = _read_peft(files, files.config)
    updates: dict[int, list[LowRank | Replaced]] = {}
    largest = 0
    for name, pair in tensors.pairs.items():
        place = _find(places, name, pair.is_embedding, files)
        rank = _check_pair(name, pair, place, files)
        if rank > max_rank:
            what = f"{files.path} has rank {rank} in {name}, {max_rank} is the limit."
            raise QuireError("adapter_rank", what, "Raise --max-adapter-rank.", "adapter")
        largest = max(largest, rank)
        updates.setdefault(place.number, []).append(_low_rank(name, pair, place, tensors.scales[name], dtype))
    for name, weight in tensors.saved.items():
        is_embedding = places.embedding(name) is not None
        if not is_embedding and name.rpartition(".")[2] != "lm_head":
            what = f"{files.path} saves the whole of {name}; only embeddings and heads can be replaced."
            raise QuireError("unsupported_adapter", what, "Train it with LoRA there, or merge it.", "adapter")
        place = _find(places, name, is_embedding, files)
        if tuple(weight.shape) != place.shape:
            raise _other_base(files, f"{name} is {list(weight.shape)} where the model has {list(place.shape)}")
        new = place.bring(weight.float(), name).to(dtype).contiguous()
        updates.setdefault(place.number, []).insert(0, Replaced(place.part.start, place.part.stop, new))
    if not updates:
        raise QuireError("bad_adapter", f"{files.path} is not a usable adapter: it changes nothing.", param="adapter")
    return Adapter(files.digest, {number: tuple(found) for number, found in updates.items()}, largest)


def _low_rank(name: str, pair: Pair, place: Place, scale: float, dtype: torch.dtype) -> LowRank:
    assert pair.a is not None and pair.b is not None
    if pair.is_embedding:  # a [rank, vocab], b [width, rank]: no form reorders an embedding's columns
        return LowRank(0, place.columns, pair.a.to(dtype).contiguous(), (pair.b.float() * scale).to(dtype).contiguous())
    b = place.bring(pair.b.float() * scale, name).to(dtype).contiguous()
    return LowRank(place.part.start, place.part.stop, pair.a.to(dtype).contiguous(), b).padded()


def _find(places: Places, name: str, is_embedding: bool, files: AdapterFiles) -> Place:
    place = places.embedding(name) if is_embedding else places.linear(name)
    if place is None:
        raise _other_base(files, f"the model has no {'embedding' if is_embedding else 'linear layer'} {name}")
    return place


def _check_pair(name: str, pair: Pair, place: Place, files: AdapterFiles) -> int:
    """Returns the rank of a pair that fits its place."""
    if pair.a is None or pair.b is None:
        what = f"{files.path} is not a usable adapter: {name} has only one of its two matrices."
        raise QuireError("bad_adapter", what, "Fetch it again.", "adapter")
    rows, columns = place.shape
    if pair.is_embedding:
        rows, columns = columns, rows
    shapes = tuple(pair.a.shape), tuple(pair.b.shape)
    rank = pair.a.shape[0] if pair.a.dim() == 2 else 0
    if shapes != ((rank, columns), (rows, rank)):
        found = " and ".join(str(list(shape)) for shape in shapes)
        raise _other_base(files, f"{name} has the matrices {found} where the model's is [{rows}, {columns}]")
    for matrix in (pair.a, pair.b):
        if not matrix.is_floating_point() or not bool(matrix.isfinite().all()):
            what = f"{files.path} is not a usable adapter: {name} has a value that is not a finite number."
            raise QuireError("bad_adapter", what, "Train or fetch it again.", "adapter")
    return rank


def _other_base(files: AdapterFiles, why: str) -> QuireError:
    trained = f" It was trained on {files.base[:200]!r}." if files.base else ""
    what = f"{files.path} does not fit this model: {why}.{trained}"
    return QuireError("adapter_mismatch", what, "Load it beside the model that it was trained on.", "adapter")


# ---------------------------------------------------------------------------------------------------------------------
# PEFT


def _read_peft(files: AdapterFiles, config: LoraConfig) -> LoraTensors:
    from safetensors import safe_open

    check_safetensors(files.weights)
    found = LoraTensors()
    with safe_open(files.weights, framework="pt") as file:
        names = list(file.keys())
        _refuse_unknown(files, names)
        stored = {name: file.get_tensor(name) for name in names}
    for name, tensor in stored.items():
        _sort(name.removeprefix(_PREFIX), tensor, config, found)
    _drop_base_embeddings(found, config)
    for module, pair in found.pairs.items():
        rank = pair.a.shape[0] if pair.a is not None else 1
        found.scales[module] = config.scale(module, max(rank, 1))
    return found


def _refuse_unknown(files: AdapterFiles, names: list[str]) -> None:
    dora = [name for name in names if "lora_magnitude_vector" in name]
    if dora:
        what = f"{files.path} is not a usable adapter: it uses DoRA ({dora[0]}), which is not supported."
        raise QuireError("bad_adapter", what, "Merge it into the weights, or train it without.", "adapter")
    biases = [name for name in names if name.endswith(".bias")]
    if biases:
        what = f"{files.path} is not a usable adapter: it changes biases ({', '.join(biases[:MAX_NAMED])})."
        raise QuireError("bad_adapter", what, "Train it with bias='none'.", "adapter")


def _sort(name: str, tensor: Tensor, config: LoraConfig, found: LoraTensors) -> None:
    match = _LORA.fullmatch(name)
    if match is None:
        module = name.removesuffix(".weight").removesuffix(".base_layer").replace(".modules_to_save", "")
        found.saved[module] = tensor
        return
    module, embedding, which = match[1], match[2], match[3]
    pair = found.pairs.setdefault(module, Pair())
    pair.is_embedding = pair.is_embedding or embedding is not None
    if which == "A":
        pair.a = tensor
    else:
        pair.b = tensor


def _drop_base_embeddings(found: LoraTensors, config: LoraConfig) -> None:
    """Drops embeddings and heads that PEFT saves with an adapter of them although they are the base's own."""
    for module in list(found.saved):
        is_saved = any(module == one or module.endswith(f".{one}") for one in config.saved_modules)
        if module in found.pairs and not is_saved:
            del found.saved[module]
