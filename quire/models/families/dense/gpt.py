"""Dense decoders before Llama: layer norms, biases, no gate projection. `families` lists them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.layers.attention import AttentionNames
from quire.layers.mlp import MLPNames
from quire.layers.norm import HeadNorms
from quire.models.families.dense.config import ONE_NORM, DenseConfig, ModelNames, layer_norm
from quire.models.fields import flag

Fields = Mapping[str, Any]
MLP = MLPNames(up=("dense_h_to_4h",), down="dense_4h_to_h")
HEADS = HeadNorms("q_layernorm", "k_layernorm", "shared", bias=True)


def with_common_names(config: Fields) -> Fields:
    """Renames GPT-NeoX's rope fields. Each head has its own keys and values, of the usual size, whatever the config
    has.
    """
    given = {"rope_theta": config.get("rotary_emb_base"), "partial_rotary_factor": config.get("rotary_pct")}
    usual = {"num_key_value_heads": None, "head_dim": None}
    return {**config, **{key: value for key, value in given.items() if value is not None}, **usual}


def gpt_neox(config: Fields, dense: DenseConfig) -> DenseConfig:
    by_head = flag(config, "qkv_by_head", True)  # GGUF files have queries, keys and values split
    return replace(
        layer_norm(config, dense),
        parallel=flag(config, "use_parallel_residual", True),
        gated=False,
        mlp_bias=True,
        names=ModelNames("gpt_neox.embed_in", "gpt_neox.layers", "gpt_neox.final_layer_norm", "embed_out"),
        attention_names=AttentionNames(("query_key_value",), "dense", block="attention", by_head=by_head),
        mlp_names=MLP,
    )


def persimmon(config: Fields, dense: DenseConfig) -> DenseConfig:
    return replace(
        layer_norm(config, dense),
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_norms=HEADS if flag(config, "qk_layernorm", True) else None,
        names=ModelNames(final_norm="model.final_layernorm"),
        attention_names=AttentionNames(("query_key_value",), "dense", by_head=True),
        mlp_names=MLP,
    )


def phi(config: Fields, dense: DenseConfig) -> DenseConfig:
    return replace(
        layer_norm(config, dense),
        norms=ONE_NORM,
        parallel=True,
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
        head_norms=HEADS if flag(config, "qk_layernorm", False) else None,
        names=ModelNames(final_norm="model.final_layernorm"),
        attention_names=AttentionNames(out="dense"),
        mlp_names=MLPNames(up=("fc1",), down="fc2"),
    )
