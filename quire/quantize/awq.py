"""AWQ: scales the columns of a matrix that meet large inputs up before rounding, and what produces these inputs down.

The product stays the same and loses less. A scale can be moved into the norm before a matrix, into the values before an
output projection, and into the up projection before a down projection. How strongly columns are scaled is searched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.formats.packed_encode import integer_scales, round_integers
from quire.quantize.calibration import Inputs
from quire.quantize.compressed_output import group_of
from quire.quantize.source import SourceModel
from quire.types import QuireError

STEPS = 20  # strengths that are tried, from 0 (no scaling) to 1
BITS = 4


@dataclass(frozen=True, slots=True)
class Chain:
    """Matrices with the same input, and what produces it: a norm, or the rows of another matrix."""

    before: str
    matrices: tuple[str, ...]


# Names within a layer of models that have them; others are rounded without scales.
_CHAINS = (
    Chain("input_layernorm.weight", ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")),
    Chain("self_attn.v_proj.weight", ("self_attn.o_proj.weight",)),
    Chain("post_attention_layernorm.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    Chain("mlp.up_proj.weight", ("mlp.down_proj.weight",)),
)
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")  # whose norms scale by their weight, and stand right before


def scale_model(
    source: SourceModel,
    inputs: Mapping[str, Inputs],
    wants: Callable[[str], bool],
    on_matrix: Callable[[str], None] = lambda name: None,
) -> dict[str, Tensor]:
    """Returns the tensors that scaling changes, in float32, by name."""
    kind = source.config.get("model_type")
    if kind not in MODEL_TYPES:
        what = f"AWQ does not know which norms stand before the matrices of model type {kind}."
        raise QuireError("unsupported_model", what, "Use --method gptq.", param="method")
    changed: dict[str, Tensor] = {}

    def tensor(name: str) -> Tensor:
        return changed[name] if name in changed else source.read(name)

    for layer in range(source.num_layers):
        prefix = f"model.layers.{layer}."
        for chain in _CHAINS:
            names = [f"{prefix}{name}" for name in chain.matrices]
            if not all(name in inputs and wants(name) for name in names):
                continue
            before = tensor(f"{prefix}{chain.before}")
            matrices = [tensor(name) for name in names]
            if before.dim() == 2 and before.shape[0] != matrices[0].shape[1]:
                continue  # several query heads share a value head
            scales = search_scales(matrices, inputs[names[0]])
            for name, matrix in zip(names, matrices, strict=True):
                changed[name] = matrix * scales
                on_matrix(name)
            changed[f"{prefix}{chain.before}"] = before / (scales.unsqueeze(1) if before.dim() == 2 else scales)
            bias = re.sub(r"weight$", "bias", f"{prefix}{chain.before}")
            if before.dim() == 2 and bias in source.checkpoint.shapes:
                changed[bias] = tensor(bias) / scales
    return changed


def search_scales(matrices: list[Tensor], inputs: Inputs) -> Tensor:
    """Returns each column's scale, [columns], with the least error of the products."""
    assert inputs.products is not None
    products = inputs.products / max(1, inputs.num_tokens)
    size = inputs.mean_squares.sqrt().clamp_min(1e-5)
    best, best_error = torch.ones_like(size), torch.inf
    group = group_of(matrices[0].shape[1])
    for step in range(STEPS):
        scales = size.pow(step / STEPS)
        scales = scales / (scales.max() * scales.min()).sqrt()
        error = sum(_error(matrix, scales, products, group) for matrix in matrices)
        if error < best_error:
            best, best_error = scales, error
    return best


def _error(matrix: Tensor, scales: Tensor, products: Tensor, group: int) -> float:
    """Returns the mean square of what rounding changes about a matrix's outputs."""
    scaled = matrix * scales
    of_groups = integer_scales(scaled, BITS, group)
    decoded = round_integers(scaled, of_groups, BITS).float() * of_groups.repeat_interleave(group, 1)
    off = decoded / scales - matrix
    return float(((off @ products) * off).sum())
