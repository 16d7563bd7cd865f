"""Fills the weights of a model on meta from a checkpoint (`shards`, or a GGUF file), or with random numbers for
benchmarks.

The loader picks a source and calls `fill_model`. Every name and shape is checked before the first byte is read. Then
each weight is filled in place, part by part, so memory never holds a second copy of the model beside the file's mapped
pages.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quire.files.gguf import GGUFFile
from quire.layers.experts import Experts
from quire.layers.linear import Linear
from quire.layers.weights import (
    WHOLE,
    Part,
    PartSource,
    RowOrder,
    ScaleTensor,
    Share,
    Weight,
    empty_padded_matrix,
    iter_weights,
    own_weights,
    put_weight,
)
from quire.models.checkpoint import Checkpoint
from quire.models.gguf import checkpoint as gguf
from quire.models.weight_errors import bad_weights, missing_weights, name_some
from quire.types import QuireError

READ_ELEMENTS = 1 << 24  # elements of a quantized tensor that are decoded at a time
HEAD = "lm_head.weight"
# Tensors that are ignored: tables that follow from the config, the head of a tied model, draft heads, and the vision
# tower where only the language model runs.
IGNORED_TENSORS = re.compile(
    r".*\.rotary_emb\.inv_freq|rope_(freqs|factors_long|factors_short)\.weight|lm_head\.weight|mtp\..*|"
    r"model\.mtp_layers\..*|model\.visual\..*|backbone\.mtp\..*|gpt_neox\.layers\.\d+\.attention\.(masked_)?bias"
)


class Fill(Protocol):
    """Source of the values of a model's weights."""

    def __call__(self, weight: Weight, tensor: Tensor) -> None:
        """Fills `tensor`, the weight's empty storage."""

    def sources(self, weight: Weight) -> list[PartSource]:
        """Returns the parts of a packed weight, which has no tensor to fill."""


def fill_model(model: nn.Module, fill: Fill, device: torch.device, on_bytes: Callable[[int], None]) -> None:
    """Makes every weight of a model on meta real. `on_bytes` is called with the total bytes filled so far."""
    uses = Counter(weight.kept_as for _, _, weight in iter_weights(model))
    shared: dict[object, Any] = {}
    done: dict[tuple[object, ...], int] = {}  # bytes by weight, counted as in `weights_bytes`
    for module in model.modules():
        for name, weight in own_weights(module):
            key = weight.kept_as
            value = shared.get(key)
            if value is None:
                value = _make_real(weight, fill, device)
                if uses[key] > 1:
                    shared[key] = value
            put_weight(module, name, value)
            done[weight.kept_as] = weight.stored_bytes
            on_bytes(sum(done.values()))
            value = None  # drops the reference, so that a value replaced in `finish_module` is freed
        finish_module(module)


def finish_module(module: nn.Module) -> None:
    """Runs a module's last loading step, once its weights are real."""
    if isinstance(module, Linear | Experts):
        module.finish()


def _make_real(weight: Weight, fill: Fill, device: torch.device) -> Any:
    if weight.packing is not None:
        return weight.packing.pack(weight, fill.sources(weight))
    tensor = empty_padded_matrix(tuple(weight.shape), weight.dtype, device)
    fill(weight, tensor)
    return tensor


class RandomFill:
    """Fills matrices with small normal numbers and norms with ones, so that activations stay in a sane range."""

    def __init__(self, device: torch.device, seed: int = 0):
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, weight: Weight, tensor: Tensor) -> None:
        if "norm" in weight.parts[0].name:
            tensor.fill_(1)
        elif weight.share == WHOLE:
            tensor.normal_(0, 0.02, generator=self.generator)
        else:  # all ranks draw the whole weight, so that they have the same weights that one rank has
            shape = (max(part.stop for part in weight.parts), *weight.parts[0].shape[1:])
            whole = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            tensor.copy_(weight.share.take(whole.normal_(0, 0.02, generator=self.generator)))

    def sources(self, weight: Weight) -> list[PartSource]:
        columns = weight.shape[1] if weight.share.columns is None else weight.parts[0].shape[-1]

        def whole(part: Part) -> Tensor:  # see `__call__`
            rows = part.stop - part.start
            return torch.empty(rows, columns).normal_(0, 0.02, generator=self.generator)

        def draw(_: int, count: int) -> Tensor:
            return torch.empty(count, columns).normal_(0, 0.02, generator=self.generator)

        if weight.share == WHOLE:
            return [PartSource((part.stop - part.start, columns), draw) for part in weight.parts]
        drawn = weight.share.take(torch.cat([whole(part) for part in weight.parts]))
        return [
            PartSource((part.stop - part.start, drawn.shape[1]), partial(_take_rows, drawn[part.start : part.stop]))
            for part in weight.parts_in({})
        ]


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


class CheckpointFill:
    """Fills weights from a checkpoint, which must hold exactly the tensors that the model needs."""

    def __init__(self, model: nn.Module, checkpoint: Checkpoint):
        check_tensors(model, checkpoint)
        check_tied(model, checkpoint)
        self.checkpoint = checkpoint

    def __call__(self, weight: Weight, tensor: Tensor) -> None:
        for part in weight.parts_in(self.checkpoint.shapes):
            target = tensor[part.start : part.stop]
            if part.is_cut:
                self._read_cut(part, target)
                continue
            shape = part.shape if part.index is None else part.shape[1:]
            if part.form is None:
                self.checkpoint.read(part.name, target.view(shape), part.index)
            else:
                read = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
                self.checkpoint.read(part.name, read, part.index)
                target.copy_(part.form(read))

    def sources(self, weight: Weight) -> list[PartSource]:
        return [self._source(part) for part in weight.parts_in(self.checkpoint.shapes)]

    def _read_cut(self, part: Part, target: Tensor) -> None:
        """Reads a rank's rows and columns of a tensor, and no others unless a form needs the whole."""
        is_matrix = len(part.shape) - (part.index is not None) == 2
        if is_matrix and (part.form is None or isinstance(part.form, RowOrder | ScaleTensor)):
            source = self.checkpoint.source(part.name, part.index)
            if isinstance(part.form, RowOrder):
                source = source.reordered(part.form.order(source.shape[0]))
            source = replace(source, blocks=None).cut(part.name, part.rows, part.columns)
            step = max(1, READ_ELEMENTS // part.shape[-1])
            for first in range(0, len(target), step):
                target[first : first + step].copy_(source.read(first, step))
            if isinstance(part.form, ScaleTensor):
                target.mul_(part.form.by)
            return
        shape = part.shape if part.index is None else part.shape[1:]
        whole = torch.empty(shape, dtype=target.dtype, device=target.device)
        self.checkpoint.read(part.name, whole, part.index)
        whole = whole if part.form is None else part.form(whole)
        share = Share(None if part.rows is None else (part.rows,), part.columns)
        target.copy_(share.take(whole.view(1, -1) if whole.dim() < target.dim() else whole))

    def _source(self, part: Part) -> PartSource:
        if part.is_cut:
            return self._source(replace(part, rows=None, columns=None)).cut(part.name, part.rows, part.columns)
        if part.form is None:
            return self.checkpoint.source(part.name, part.index)
        if isinstance(part.form, RowOrder):
            source = self.checkpoint.source(part.name, part.index)
            if source.blocks is not None:
                return source.reordered(part.form.order(source.shape[0]))
        rows = torch.empty(part.shape if part.index is None else part.shape[1:])
        self.checkpoint.read(part.name, rows, part.index)
        rows = rows if part.form is None else part.form(rows)
        return PartSource(tuple(rows.shape), lambda first, count: rows[first : first + count])


def _take_rows(tensor: Tensor, first: int, count: int) -> Tensor:
    return tensor[first : first + count]


def check_tensors(model: Any, checkpoint: Checkpoint) -> None:
    """Raises an error that names the tensors if some are missing, unexpected or of the wrong shape."""
    found = checkpoint.shapes
    wanted = {part.name: part.shape for _, _, weight in iter_weights(model) for part in weight.layout_in(found)}
    missing = [name for name in wanted if name not in found]
    ignored_prefixes = model.ignored_prefixes()
    ignored_tensors = [IGNORED_TENSORS.fullmatch, *(re.compile(p).search for p in model.ignored_patterns())]
    unexpected = [
        name
        for name in found
        if name not in wanted
        and not name.startswith(ignored_prefixes)
        and not any(fits(name) for fits in ignored_tensors)
    ]
    unexpected = [name for name in unexpected if not _is_zero_bias(checkpoint, name, wanted)]
    misshapen = [name for name, shape in wanted.items() if name in found and found[name] != shape]
    if missing:
        raise missing_weights(checkpoint.where, missing)
    if unexpected:
        raise bad_weights(f"{checkpoint.where} holds {name_some(unexpected)}, which this model does not have")
    if misshapen:
        name = misshapen[0]
        what = f"{checkpoint.where} holds {name_some(misshapen)} in the wrong shape: {list(found[name])}"
        raise bad_weights(f"{what} where the config requires {list(wanted[name])}")


def _is_zero_bias(checkpoint: Checkpoint, name: str, wanted: Mapping[str, object]) -> bool:
    """Returns whether a tensor is an all-zero bias of a layer without bias. Some quantizers write these."""
    shape = checkpoint.shapes[name]
    if not name.endswith(".bias") or name.replace(".bias", ".weight") not in wanted or len(shape) != 1:
        return False
    bias = torch.empty(shape)
    checkpoint.read(name, bias)
    return not bias.any()


def check_tied(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Raises if a tied checkpoint holds a head that differs from the embedding. With `tie_word_embeddings` the head may
    only be a copy, since transformers would use the checkpoint's.
    """
    uses = Counter(weight.layout_in(checkpoint.shapes) for _, _, weight in iter_weights(model))
    if HEAD not in checkpoint.shapes or any(part.name == HEAD for parts in uses for part in parts):
        return
    for (part, *others), count in uses.items():
        if count > 1 and not others and len(part.shape) == 2 and not are_copies(checkpoint, part.name, HEAD):
            what = f"{checkpoint.where} holds {HEAD}, which is not {part.name}, although config.json ties them."
            raise QuireError("bad_weights", what, "If this head is the right one, set tie_word_embeddings to false.")


def are_copies(checkpoint: Checkpoint, one: str, other: str) -> bool:
    """Compares 64 rows spread over both matrices. Reading both in full would take as long as loading one."""
    num_rows, width = checkpoint.shapes[one]
    if checkpoint.shapes[other] != (num_rows, width):
        return False
    rows = torch.empty(2, width)
    for index in sorted({i * (num_rows - 1) // 63 for i in range(64)}):
        checkpoint.read(one, rows[0], index)
        checkpoint.read(other, rows[1], index)
        if not torch.equal(rows[0], rows[1]):
            return False
    return True


class GGUFCheckpoint:
    """A GGUF file under Hugging Face names, decoded a few rows at a time."""

    def __init__(self, file: GGUFFile, head_dim: int):
        self.where = str(file.path)
        self.file = file
        self.head_dim = head_dim
        self._tensors = gguf.named_tensors(file)
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str, target: Tensor, index: int | None = None) -> None:
        tensor = self._tensors[name]
        if index is not None:
            target.copy_(gguf.read_rows(tensor, index, 1)[0])
            return
        permuted = gguf.is_permuted(self.file, name)
        row_elements = max(1, target[:1].numel())
        # Rows are permuted within a head, so whole heads are read at a time.
        step = max(1, READ_ELEMENTS // row_elements // self.head_dim) * self.head_dim
        for first in range(0, tensor.shape[0], step):
            rows = gguf.read_rows(tensor, first, min(step, tensor.shape[0] - first))
            target[first : first + step].copy_(gguf.unpermute(rows, self.head_dim) if permuted else rows)

    def source(self, name: str, index: int | None = None) -> PartSource:
        tensor = self._tensors[name]
        source = PartSource(tensor.shape, partial(gguf.read_rows, tensor), tensor.type.name, gguf.raw_blocks(tensor))
        if index is not None:
            return source.entry(index, tensor.shape[0])
        if not gguf.is_permuted(self.file, name):
            return source
        return source.reordered(gguf.unpermute(torch.arange(tensor.shape[0]), self.head_dim))
