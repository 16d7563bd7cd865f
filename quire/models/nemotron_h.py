"""Nemotron-H: Mamba2 layers, attention without rope, and squared-ReLU feed-forward blocks, ordered by a pattern."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quire.kernels.table import Ops
from quire.layers.attention import Attention, AttentionShape
from quire.layers.mlp import MLPNames, PlainMLP, check_activation
from quire.layers.norm import RMSNorm
from quire.layers.quant import Scheme
from quire.layers.recurrent_mamba import Mamba2, MambaOptions
from quire.layers.rope import Rope, RopeConfig
from quire.models.fields import flag, number, whole
from quire.models.hybrid import (
    BlockKind,
    HybridModel,
    HybridShape,
    Names,
    block_activations,
    check_attention,
    unknown_layer,
)
from quire.models.mamba2 import MambaFields

FIELDS = MambaFields("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "use_conv_bias",
                     "use_bias", "mamba_hidden_act")  # fmt: skip
MLP_NAMES = MLPNames(("up_proj",), "down_proj")
LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
LAYER_TYPES: dict[str, BlockKind] = {
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "full_attention": "attention",
    "attention": "attention",
    "mlp": "plain",
}


@dataclass(frozen=True, slots=True)
class NemotronHConfig:
    shape: HybridShape
    options: MambaOptions
    inner_width: int
    mlp_bias: bool
    activation: str

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> NemotronHConfig:
        width, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads", 32)
        kv_heads = whole(config, "num_key_value_heads", heads)
        head_dim = whole(config, "head_dim", 128)
        check_attention(heads, kv_heads, head_dim)
        eps = number(config, "layer_norm_epsilon", 1e-5)
        recurrent = FIELDS.shape(config)
        shape = HybridShape(
            vocab_size=whole(config, "vocab_size"),
            width=width,
            norm_eps=eps,
            max_positions=whole(config, "max_position_embeddings", 4096),
            tied=flag(config, "tie_word_embeddings", False),
            attention=AttentionShape(width, heads, kv_heads, head_dim),
            recurrent=recurrent,
            blocks=_blocks(config),
        )
        options = FIELDS.options(config, eps, recurrent.num_groups)
        return cls(
            shape=shape,
            options=options,
            inner_width=whole(config, "intermediate_size", 21504),
            mlp_bias=flag(config, "mlp_bias", False),
            activation=check_activation(config.get("mlp_hidden_act") or "relu2"),
        )


class NemotronHModel(HybridModel):
    def __init__(self, config: NemotronHConfig, *, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device,
                 page_tokens: int, ops: Ops, scheme: Scheme):  # fmt: skip
        shape = config.shape
        attention, recurrent = shape.attention, shape.recurrent
        assert attention is not None and recurrent is not None

        def make_block(place: int, cache_index: int) -> nn.Module:
            prefix = f"backbone.layers.{place}.mixer"
            norm = RMSNorm(f"backbone.layers.{place}.norm", shape.width, shape.norm_eps, dtype, ops)
            match shape.blocks[place]:
                case "recurrent":
                    return Mamba2(prefix, norm, shape.width, recurrent, cache_index, config.options, dtype=dtype,
                                  ops=ops, scheme=scheme)  # fmt: skip
                case "attention":
                    return Attention(prefix, norm, attention, cache_index, qkv_bias=False, out_bias=False,
                                     qk_norm=None, dtype=dtype, ops=ops, scheme=scheme)  # fmt: skip
                case _:
                    return PlainMLP(prefix, norm, shape.width, config.inner_width, bias=config.mlp_bias, dtype=dtype,
                                    scheme=scheme, activation=config.activation, names=MLP_NAMES)  # fmt: skip

        # Positions come from the recurrent layers: nothing turns.
        rope = Rope(RopeConfig("none"), attention.head_dim, dtype, device, ops)
        names = Names("backbone.embeddings", "backbone.norm_f")
        super().__init__(
            shape, names, make_block, rope, block_activations(shape, 2 * config.inner_width), dtype=dtype,
            cache_dtype=cache_dtype, page_tokens=page_tokens, ops=ops, scheme=scheme,
        )  # fmt: skip

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> NemotronHConfig:
        return NemotronHConfig.from_hf(config)


def _blocks(config: Mapping[str, Any]) -> tuple[BlockKind, ...]:
    """One block a layer, by a list of names or by the older string of letters."""
    kinds = config.get("layers_block_type")
    if kinds is None:
        kinds = [LETTERS.get(letter, letter) for letter in config.get("hybrid_override_pattern") or ""]
    if not kinds:
        raise unknown_layer(None, 0, tuple(LAYER_TYPES))
    for place, kind in enumerate(kinds):
        if kind not in LAYER_TYPES:
            raise unknown_layer(kind, place, tuple(LAYER_TYPES))
    return tuple(LAYER_TYPES[kind] for kind in kinds)
