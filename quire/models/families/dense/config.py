"""The config of `DenseModel`, and the reader of the config.json fields that all dense families share.

`families` reads the other fields, family by family. A field's default is Llama's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.layers.attention import AttentionNames, QueryScaling
from quire.layers.mlp import MLPNames, check_activation
from quire.layers.norm import HeadNorms
from quire.layers.rope import RopeConfig
from quire.models.fields import check_heads, check_layer_types, flag, number, whole
from quire.types import QuireError

LLAMA_ATTENTION, LLAMA_MLP = AttentionNames(), MLPNames()


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Checkpoint names of a layer's norms; None: no norm at that place."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


ONE_NORM = LayerNames("input_layernorm", None, "input_layernorm", None)  # both blocks read the same normed input


@dataclass(frozen=True, slots=True)
class ModelNames:
    """Checkpoint names of the layers, and of what precedes and follows them."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    head: str = "lm_head"


@dataclass(frozen=True, slots=True)
class NormStyle:
    """Kind and options of a family's norms."""

    kind: str = "rms"  # rms, or layer, which subtracts the mean
    eps: float = 1e-6
    weight: bool = True  # layer only
    bias: bool = False  # layer only
    offset: float = 0.0  # added to the checkpoint's weights


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """Every option of the dense decoder. Defaults are Llama's."""

    vocab_size: int
    width: int
    inner_width: int  # of the feed-forward block
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    ropes: tuple[RopeConfig, ...]  # per layer
    windows: tuple[int | None, ...]  # per layer; a token sees itself and the window - 1 tokens before it; None: all
    rope_dim: int  # leading elements of a head that rope rotates
    tied: bool  # the head is the embedding
    norm: NormStyle = NormStyle()
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: str = "none"  # head: per head; after_rope: per head after rope; wide: over all heads together
    head_norms: HeadNorms | None = None  # per-head layer norms, instead of `qk_norm`
    rope_interleaved: bool = False  # rope rotates adjacent elements in the checkpoint, instead of halves
    parallel: bool = False  # attention and feed-forward block both read the layer's input
    activation: str = "silu"
    gated: bool = True  # the feed-forward block has a gate projection
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_softcap: float | None = None
    sinks: bool = False  # attention sinks: a learned score per head without a value
    query_scaling: QueryScaling | None = None  # scales queries by their positions
    clip: float | None = None  # limit on the magnitude of queries, keys and values
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of each block's output
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    names: ModelNames = ModelNames()
    norms: LayerNames = LayerNames()
    attention_names: AttentionNames = LLAMA_ATTENTION
    mlp_names: MLPNames = LLAMA_MLP
    mtp_layers: str | None = None  # prefix of layers for multi-token prediction, as MiMo publishes them


def read_common(config: Mapping[str, Any]) -> DenseConfig:
    """Reads the fields that every dense family has, under their most common names."""
    width = whole(config, "hidden_size")
    num_heads = whole(config, "num_attention_heads")
    num_layers = whole(config, "num_hidden_layers")
    num_kv_heads = whole(config, "num_key_value_heads", num_heads)
    if config.get("head_dim") is None and width % num_heads:
        what = f"hidden_size={width} does not divide into {num_heads} heads, and config.json gives no head_dim."
        raise QuireError("bad_config", what, "Check config.json.")
    head_dim = whole(config, "head_dim", width // num_heads)
    check_heads(num_heads, num_kv_heads, head_dim)
    windows = _windows(config, num_layers)
    ropes = _ropes(config, num_layers)
    max_positions = whole(config, "max_position_embeddings", 2048)
    yarn = next((rope for rope in ropes if rope.kind == "yarn"), None)
    if yarn is not None:  # some files give the length before YaRN scaling, some the length after it
        max_positions = max(max_positions, int(yarn.original_len * yarn.factor))
    has_bias = flag(config, "attention_bias", False)
    return DenseConfig(
        vocab_size=whole(config, "vocab_size"),
        width=width,
        inner_width=whole(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        ropes=ropes,
        windows=windows,
        rope_dim=_rope_dim(config, head_dim),
        tied=flag(config, "tie_word_embeddings", False),
        norm=NormStyle(eps=number(config, "rms_norm_eps", 1e-6)),
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=flag(config, "mlp_bias", False),
        activation=check_activation(config.get("hidden_activation") or config.get("hidden_act") or "silu"),
    )


def layer_norm(config: Mapping[str, Any], dense: DenseConfig, eps_key: str = "layer_norm_eps") -> DenseConfig:
    """Switches all norms to layer norms with bias."""
    return replace(dense, norm=NormStyle("layer", number(config, eps_key, 1e-5), bias=True))


def window_size(config: Mapping[str, Any]) -> int | None:
    """Returns `sliding_window`; None if absent or null."""
    window = config.get("sliding_window")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        what = f"sliding_window={window!r} must be a whole number above 0."
        raise QuireError("bad_config", what, "Check config.json.")
    return window


def _windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Returns each layer's window by `layer_types`. Without that field there are none, and the family's rule
    applies.
    """
    kinds = config.get("layer_types")
    if kinds is None:
        return (None,) * num_layers
    known = {"full_attention": None, "sliding_attention": window_size(config)}
    check_layer_types(kinds, known, num_layers)
    return tuple(known[kind] for kind in kinds)


def _ropes(config: Mapping[str, Any], num_layers: int) -> tuple[RopeConfig, ...]:
    """Returns each layer's rope: one for all layers, or one per entry of `layer_types`."""
    given = config.get("rope_parameters") or {}
    kinds = config.get("layer_types")
    if kinds is None or not set(given) & {"full_attention", "sliding_attention"}:
        return (RopeConfig.from_hf(dict(config)),) * num_layers
    by_kind = {kind: RopeConfig.from_hf({**config, "rope_parameters": given.get(kind) or {}}) for kind in set(kinds)}
    return tuple(by_kind[kind] for kind in kinds)


def _rope_dim(config: Mapping[str, Any], head_dim: int) -> int:
    """Returns how many elements of a head rope rotates."""
    given = config.get("rope_parameters") or {}
    share = number({**config, **given}, "partial_rotary_factor", 1.0)
    rope_dim = int(head_dim * share)
    if not 0 < rope_dim <= head_dim or rope_dim % 2 or (head_dim - rope_dim) % 2:
        what = f"partial_rotary_factor={share} of {head_dim} elements is not an even number."
        raise QuireError("bad_config", what, "Check config.json.")
    return rope_dim
