"""The dense decoder family in one file, driven by flags: Llama 2 and 3, SmolLM2, Mistral, Qwen2 and 2.5, Qwen3.

The registry names `DenseModel`, the loader builds it on meta and fills it, the runtime calls `forward` and `logits`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.angles import Angles
from quire.kernels.table import Ops
from quire.layers.attention import (
    Attention,
    AttentionPlan,
    AttentionShape,
    plan_attention,
    plan_last_attention,
)
from quire.layers.embedding import Embedding, Head
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.quant import Scheme
from quire.layers.rope import Rope, RopeConfig
from quire.layers.step import Step
from quire.models.fields import whole
from quire.types import CacheSpec, QuireError

EMBEDDING = "model.embed_tokens"
DEFAULT_WINDOW = 4096  # Mistral's and Qwen's, where config.json is silent


@dataclass(frozen=True, slots=True)
class DenseConfig:
    vocab_size: int
    width: int
    inner_width: int  # of the feed-forward block
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: RopeConfig
    windows: tuple[int | None, ...]  # per layer: a token sees itself and the window - 1 before it; None: all
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool  # the head is the embedding

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DenseConfig:
        """Read the fields of a config.json; what it leaves out has the value transformers gives it."""
        kind = config.get("model_type")
        width = whole(config, "hidden_size")
        num_heads = whole(config, "num_attention_heads")
        num_layers = whole(config, "num_hidden_layers")
        num_kv_heads = whole(config, "num_key_value_heads", num_heads)
        head_dim = whole(config, "head_dim", 128 if kind == "qwen3" else width // num_heads)
        if num_heads % num_kv_heads or head_dim % 2:
            what = f"{num_heads} heads of {head_dim} over {num_kv_heads} key-value heads make no attention layer."
            raise QuireError("bad_config", what, "Check config.json.")
        activation = config.get("hidden_act") or "silu"
        if activation not in ("silu", "swish"):
            raise QuireError("unsupported_model", f"Activation {activation!r} is not supported.", "Supported is silu.")
        rope = RopeConfig.from_hf(dict(config))
        max_positions = whole(config, "max_position_embeddings", 2048)
        if rope.kind == "yarn":  # some files give the length before scaling, some the length after
            max_positions = max(max_positions, int(rope.original_len * rope.factor))
        has_bias = bool(config.get("attention_bias", False))
        return cls(
            vocab_size=whole(config, "vocab_size"),
            width=width,
            inner_width=whole(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_eps=float(config.get("rms_norm_eps") or 1e-6),
            max_positions=max_positions,
            rope=rope,
            windows=_windows(config, num_layers),
            qkv_bias=has_bias or kind == "qwen2",
            out_bias=has_bias and kind != "qwen2",
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=kind == "qwen3",
            tied=bool(config.get("tie_word_embeddings", False)),
        )


# What a family puts in place of a layer's feed-forward block, given its index and norm; None: the block as it is.
FeedForward = Callable[[int, RMSNorm], nn.Module | None]


class DenseLayer(nn.Module):
    def __init__(self, index: int, cache_index: int, config: DenseConfig, dtype: torch.dtype, ops: Ops,
                 scheme: Scheme, feed_forward: FeedForward | None):  # fmt: skip
        super().__init__()
        prefix = f"model.layers.{index}"
        self.attention = Attention(
            f"{prefix}.self_attn",
            RMSNorm(f"{prefix}.input_layernorm", config.width, config.norm_eps, dtype, ops),
            AttentionShape(config.width, config.num_heads, config.num_kv_heads, config.head_dim),
            cache_index,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
            qk_norm_eps=config.norm_eps if config.qk_norm else None,
            dtype=dtype,
            ops=ops,
            scheme=scheme,
        )
        mlp_norm = RMSNorm(f"{prefix}.post_attention_layernorm", config.width, config.norm_eps, dtype, ops)
        mlp = None if feed_forward is None else feed_forward(index, mlp_norm)
        self.mlp = mlp or GatedMLP(
            f"{prefix}.mlp",
            mlp_norm,
            config.width,
            config.inner_width,
            bias=config.mlp_bias,
            dtype=dtype,
            scheme=scheme,
        )

    def forward(self, stream: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        """stream [tokens, width]: the residual stream, to which each block adds its share"""
        stream = self.attention(stream, angles, plan)
        return self.mlp(stream) if len(stream) else stream  # nothing is left where no token is wanted


class DenseModel(nn.Module):
    def __init__(self, config: DenseConfig, *, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device,
                 page_tokens: int, ops: Ops, scheme: Scheme, feed_forward: FeedForward | None = None):  # fmt: skip
        super().__init__()
        self.config = config
        self.ops = ops
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.activation_elements = 4 * config.width + max(heads, 3 * config.inner_width)
        self.specs = _cache_specs(config, cache_dtype, page_tokens)
        places = {layer: (spec.group, place) for spec in self.specs for place, layer in enumerate(spec.layers)}
        self.embedding = Embedding(EMBEDDING, config.vocab_size, config.width, dtype)
        self.layers = nn.ModuleList(
            DenseLayer(index, places[index][1], config, dtype, ops, scheme, feed_forward)
            for index in range(config.num_layers)
        )
        self.layer_groups = [places[index][0] for index in range(config.num_layers)]
        self.norm = RMSNorm("model.norm", config.width, config.norm_eps, dtype, ops)
        self.head = Head(EMBEDDING if config.tied else "lm_head", config.vocab_size, config.width, dtype, scheme)
        self.rope = Rope(config.rope, config.head_dim, dtype, device, ops)

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> DenseConfig:
        return DenseConfig.from_hf(config)

    def forward(self, step: Step, caches: Mapping[str, Tensor]) -> Tensor:
        """Compute the step's tokens and leave their keys and values in `caches`, one tensor per group:
        [layers, 2, pages, page_tokens, kv_heads, head_dim]. Returns the normed hidden states wanted, [n, width].
        """
        plans = {spec.group: plan_attention(step, spec, caches[spec.group], self.ops) for spec in self.specs}
        angles = self.rope.angles(step.positions)
        stream = self.embedding(step.tokens)
        *groups, last = self.layer_groups
        for layer, group in zip(self.layers, groups, strict=False):
            stream = layer(stream, angles, plans[group])
        spec = next(spec for spec in self.specs if spec.group == last)
        plan = plan_last_attention(plans[last], step, spec, caches[last], self.ops)
        stream = self.layers[-1](stream, angles, plan)
        return self.norm(stream) if len(stream) else stream

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, width] -> [n, vocab]"""
        return self.head(hidden)


def _cache_specs(config: DenseConfig, dtype: torch.dtype, page_tokens: int) -> list[CacheSpec]:
    """Layers that see everything are one group, layers with a window another."""
    specs = []
    for window in sorted(set(config.windows), key=lambda window: window or 0):
        specs.append(
            CacheSpec(
                group="full" if window is None else "window",
                kind="paged",
                layers=tuple(index for index, other in enumerate(config.windows) if other == window),
                shape=(config.num_kv_heads, config.head_dim),
                dtype=str(dtype).removeprefix("torch."),
                page_tokens=page_tokens,
                window=window,
            )
        )
    return specs


def _windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Which layers see only a window: `layer_types` says it layer by layer, else the model type's own rule does."""
    kind = config.get("model_type")
    window = config.get("sliding_window", DEFAULT_WINDOW)
    if kind in ("qwen2", "qwen3") and not config.get("use_sliding_window", False):
        window = None
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise QuireError(
            "bad_config", f"sliding_window={window!r} must be a whole number above 0.", "Check config.json."
        )
    kinds = config.get("layer_types")
    if kinds is not None:
        known = {"full_attention": None, "sliding_attention": window}
        if len(kinds) != num_layers or not set(kinds) <= set(known):
            what = f"layer_types must give full_attention or sliding_attention for each of the {num_layers} layers."
            raise QuireError("unsupported_model", what, "Check config.json.")
        return tuple(known[kind] for kind in kinds)
    if kind == "mistral":
        return (window,) * num_layers
    if kind in ("qwen2", "qwen3"):
        first = config.get("max_window_layers", 28)
        return tuple(window if index >= first else None for index in range(num_layers))
    return (None,) * num_layers
