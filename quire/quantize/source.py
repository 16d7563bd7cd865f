"""The checkpoint that is quantized: its tensors as floats, under their names in a Hugging Face checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quire.files.gguf import GGUFFile, open_gguf
from quire.files.source import ModelFiles
from quire.kernels.formats.gguf_blocks import FORMATS
from quire.models.checkpoint import Checkpoint
from quire.models.loading.loader import open_shards, read_config
from quire.models.loading.sources import GGUFCheckpoint
from quire.types import QuireError

FLOATS = ("F64", "F32", "F16", "BF16")
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_TABLES = ("embed_tokens.weight", "embed_in.weight", "embeddings.weight")
_HEADS = ("lm_head.weight", "embed_out.weight")
# Matrices that are small, and that many tokens' ways depend on: routers, convolutions, decays.
_NOT_LINEAR = re.compile(
    r".*(norm|conv|conv1d|A_log|dt_bias|\.D|taps|rotary|router(\.weight|\.layer\.weight)|mlp\.gate\.weight|"
    r"feed_forward\.gate\.weight|block_sparse_moe\.gate\.weight|shared_expert_gate\.weight|per_layer_.*)(\.weight)?"
)


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What a recipe knows of a tensor."""

    name: str  # in a Hugging Face checkpoint
    shape: tuple[int, ...]
    role: str  # table, head, linear, or other: what is never quantized
    layer: int | None
    num_layers: int

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def is_quantizable(self) -> bool:
        return self.role != "other"


class SourceModel:
    """An open checkpoint."""

    def __init__(self, files: ModelFiles):
        self.files = files
        self.file: GGUFFile | None = open_gguf(files.path) if files.kind == "gguf" else None
        self.config: Mapping[str, Any] = read_config(files)
        self.num_layers = int(self.config.get("num_hidden_layers") or 0)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        if self.file is not None:
            return GGUFCheckpoint(self.file, self.config["head_dim"])
        return open_shards(self.files)

    def tensors(self) -> list[TensorFacts]:
        return [self.facts(name, shape) for name, shape in self.checkpoint.shapes.items()]

    def facts(self, name: str, shape: tuple[int, ...]) -> TensorFacts:
        found = _LAYER.search(name)
        layer = int(found[1]) if found else None
        return TensorFacts(name, shape, role_of(name, shape), layer, self.num_layers)

    def read(self, name: str) -> Tensor:
        """Returns a tensor in float32."""
        target = torch.empty(self.checkpoint.shapes[name])
        self.checkpoint.read(name, target)
        return target

    def check_is_float(self) -> None:
        """Refuses a checkpoint whose matrices are quantized: what they lost would be lost twice."""
        if self.file is not None:
            kinds = {tensor.type.name for tensor in self.file.tensors.values() if len(tensor.shape) > 1}
        else:
            kinds = set(self.config.get("tensor_types", {}).values())
        already = sorted(kinds - set(FLOATS))
        if already:
            what = f"{self.files.name} is quantized already ({', '.join(already)})."
            hint = "Take the original checkpoint, or add --requantize to quantize its decoded weights."
            raise QuireError("invalid_parameter", what, hint, param="model")
        unknown = sorted(kinds - set(FORMATS) - set(FLOATS))
        assert not unknown, unknown


def role_of(name: str, shape: tuple[int, ...]) -> str:
    if len(shape) not in (2, 3) or 1 in shape or not name.endswith(("weight", "gate_up_proj", "down_proj")):
        return "other"
    if name.endswith(_TABLES):
        return "table"
    if name.endswith(_HEADS):
        return "head"
    return "other" if _NOT_LINEAR.fullmatch(name) else "linear"
