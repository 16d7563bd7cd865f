"""Gemma 4's text model: two head sizes, layers that share the keys and values of earlier ones, per-layer inputs.

The registry names `Gemma4Model`. What it shares with Gemma 3 (norms around both blocks, alternating windows, two ropes)
is built from the common layers. What is its own is here, except for its experts (`gemma4_experts`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from quire.kernels.activations import CURVES
from quire.kernels.angles import Angles, angle_tables
from quire.kernels.reference import small_ops as reference
from quire.layers.attention import AttentionPlan, AttentionShape, plan_attention
from quire.layers.build import Build
from quire.layers.embedding import Embedding, Head
from quire.layers.experts import MoEShape
from quire.layers.kv_specs import kv_specs, refuse_whole_layers
from quire.layers.linear import Linear
from quire.layers.mlp import ACTIVATIONS, GatedMLP, check_activation
from quire.layers.moe import moe_activations
from quire.layers.norm import RMSNorm
from quire.layers.residual_join import ResidualJoin
from quire.layers.rope import Rope, RopeConfig
from quire.layers.step import Step
from quire.layers.weights import Weight
from quire.models.families.gemma4_experts import MLPAndExperts, read_experts
from quire.models.fields import (
    above_zero,
    check_causal,
    check_heads,
    check_layer_types,
    flag,
    number,
    whole,
)
from quire.models.model import Model
from quire.types import CacheSpec, QuireError

_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
}


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Sizes of one layer."""

    kind: str  # full_attention or sliding_attention
    head_dim: int
    num_kv_heads: int
    inner_width: int
    source: int  # the layer whose keys and values it reads: itself, or an earlier one
    k_is_v: bool  # values are the keys before their norm


@dataclass(frozen=True, slots=True)
class Gemma4Config:
    """Shape and options of a Gemma 4 text model."""

    vocab_size: int
    width: int
    num_heads: int
    layers: tuple[LayerConfig, ...]
    window: int
    ropes: Mapping[str, RopeConfig]  # by layer kind
    max_positions: int
    eps: float
    activation: str
    attention_bias: bool
    tied: bool
    logit_softcap: float | None
    input_vocab: int  # of the per-layer inputs
    input_width: int  # per layer; 0: no per-layer inputs
    experts: MoEShape | None  # next to every layer's feed-forward block

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Gemma4Config:
        check_causal(config)
        num_layers, width = whole(config, "num_hidden_layers", 30), whole(config, "hidden_size", 2304)
        kinds = config.get("layer_types")
        if kinds is None:
            kinds = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(num_layers)]
        check_layer_types(kinds, _ROPES, num_layers)
        kinds = [*kinds[:-1], "full_attention"]  # as in transformers, whatever config.json has
        ropes = config.get("rope_parameters") or _ROPES
        caps = config.get("final_logit_softcapping")
        return cls(
            vocab_size=whole(config, "vocab_size", 262144),
            width=width,
            num_heads=whole(config, "num_attention_heads", 8),
            layers=_layers(config, kinds),
            window=whole(config, "sliding_window", 512),
            ropes={
                kind: RopeConfig.from_hf({**config, "rope_parameters": ropes.get(kind) or {}}) for kind in set(kinds)
            },
            max_positions=whole(config, "max_position_embeddings", 131072),
            eps=number(config, "rms_norm_eps", 1e-6),
            activation=check_activation(config.get("hidden_activation") or "gelu_pytorch_tanh"),
            attention_bias=flag(config, "attention_bias", False),
            tied=flag(config, "tie_word_embeddings", True),
            logit_softcap=None if caps is None else above_zero(config, "final_logit_softcapping", 0.0),
            input_vocab=whole(config, "vocab_size_per_layer_input", 262144),
            input_width=int(number(config, "hidden_size_per_layer_input", 256)),
            experts=read_experts(config, width) if flag(config, "enable_moe_block", False) else None,
        )


class Gemma4Attention(nn.Module):
    """Attention with normed queries, keys and values; a layer without its own keys and values reads another's cache."""

    def __init__(
        self,
        prefix: str,
        norm: RMSNorm,
        shape: AttentionShape,
        cache_index: int,
        *,
        owns_kv: bool,
        k_is_v: bool,
        bias: bool,
        eps: float,
        build: Build,
        join: ResidualJoin,
    ):
        super().__init__()
        self.norm = norm
        self.shape = shape
        self.cache_index = cache_index
        self.eps = eps
        self.ops = build.ops
        self.join = join
        self.q_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        sources = [(f"{prefix}.q_proj", self.q_rows)]
        self.q_weight: Tensor = Weight.whole(f"{prefix}.q_norm.weight", (shape.head_dim,), build.dtype)
        self.k_weight: Tensor | None = None
        if owns_kv:
            sources += [(f"{prefix}.k_proj", kv_rows), (f"{prefix}.{'k_proj' if k_is_v else 'v_proj'}", kv_rows)]
            self.k_weight = Weight.whole(f"{prefix}.k_norm.weight", (shape.head_dim,), build.dtype)
        self.project = Linear(shape.width, sources, bias=bias, build=build)
        self.out = Linear(self.q_rows, [(f"{prefix}.o_proj", shape.width)], bias=bias, build=build)

    def forward(self, stream: Tensor, angles: Angles, tables: Angles, plan: AttentionPlan) -> Tensor:
        """Adds this block's output to stream [tokens, width]. `tables`: the angles as cosine and sine tables."""
        k_cache, v_cache = plan.planes[2 * self.cache_index], plan.planes[2 * self.cache_index + 1]
        head_dim = self.shape.head_dim
        projected = self.project(stream, norm=self.norm)
        if self.k_weight is not None:
            v = projected[:, -self.shape.num_kv_heads * head_dim :].unflatten(1, (-1, head_dim))
            v.copy_(functional.rms_norm(v, (head_dim,), None, self.eps))
            q = self.ops.qk_norm_rope_write(
                projected,
                self.q_weight,
                self.k_weight,
                self.eps,
                angles,
                k_cache,
                v_cache,
                plan.slots,
                self.shape.num_heads,
            )
        else:
            assert tables.cos is not None and tables.sin is not None
            q = functional.rms_norm(projected.view(len(stream), -1, head_dim), (head_dim,), self.q_weight, self.eps)
            q = reference.rope(q, tables.cos, tables.sin)
        attended = self.ops.paged_attention(q, k_cache, v_cache, plan.kernel, 1.0)
        return self.join(self.out, attended, stream)


class LayerInput(nn.Module):
    """Adds a layer's own input: stream + norm(up(act(down(stream)) * input))."""

    def __init__(
        self,
        prefix: str,
        width: int,
        input_width: int,
        activation: str,
        norm: RMSNorm,
        build: Build,
    ):
        super().__init__()
        self.down = Linear(width, [(f"{prefix}.per_layer_input_gate", input_width)], build=build)
        self.up = Linear(input_width, [(f"{prefix}.per_layer_projection", width)], build=build)
        self.activate = CURVES[ACTIVATIONS[activation]]
        self.join = ResidualJoin(norm)

    def forward(self, stream: Tensor, given: Tensor) -> Tensor:
        """Runs on stream [tokens, width] and given [tokens, input_width]."""
        return self.join(self.up, self.activate(self.down(stream)) * given, stream)


class Gemma4Layer(nn.Module):
    """Attention, a feed-forward block (with experts), a per-layer input, and a scale on the stream."""

    scalar: Tensor

    def __init__(self, index: int, cache_index: int, config: Gemma4Config, build: Build):
        super().__init__()
        prefix, layer = f"model.layers.{index}", config.layers[index]

        def norm(name: str) -> RMSNorm:
            return RMSNorm(f"{prefix}.{name}", config.width, config.eps, build)

        self.attention = Gemma4Attention(
            f"{prefix}.self_attn",
            norm("input_layernorm"),
            AttentionShape(config.width, config.num_heads, layer.num_kv_heads, layer.head_dim),
            cache_index,
            owns_kv=layer.source == index,
            k_is_v=layer.k_is_v,
            bias=config.attention_bias,
            eps=config.eps,
            build=build,
            join=ResidualJoin(norm("post_attention_layernorm")),
        )
        experts, last = config.experts, norm("post_feedforward_layernorm")
        mlp = GatedMLP(
            f"{prefix}.mlp",
            norm("pre_feedforward_layernorm"),
            config.width,
            layer.inner_width,
            bias=False,
            build=build,
            activation=config.activation,
            join=ResidualJoin(last if experts is None else norm("post_feedforward_layernorm_1")),
        )
        self.mlp: nn.Module = mlp
        if experts is not None:
            self.mlp = MLPAndExperts(
                prefix,
                mlp,
                experts,
                norm("pre_feedforward_layernorm_2"),
                norm("post_feedforward_layernorm_2"),
                last,
                build=build,
            )
        self.input = None
        if config.input_width:
            self.input = LayerInput(
                prefix,
                config.width,
                config.input_width,
                config.activation,
                norm("post_per_layer_input_norm"),
                build,
            )
        self.scalar = Weight.whole(f"{prefix}.layer_scalar", (1,), build.dtype)

    def forward(
        self, stream: Tensor, given: Tensor | None, angles: Angles, tables: Angles, plan: AttentionPlan
    ) -> Tensor:
        stream = self.mlp(self.attention(stream, angles, tables, plan))
        if self.input is not None and given is not None:
            stream = self.input(stream, given)
        return stream * self.scalar


class LayerInputs(nn.Module):
    """Computes every layer's own input of each token: the mean of a per-layer embedding and a projection of the
    embedding.
    """

    def __init__(self, config: Gemma4Config, build: Build):
        super().__init__()
        rows = len(config.layers) * config.input_width
        self.input_width = config.input_width
        self.embedding = Embedding(
            "model.embed_tokens_per_layer", config.input_vocab, rows, build, math.sqrt(config.input_width)
        )
        self.project = Linear(config.width, [("model.per_layer_model_projection", rows)], build=build)
        self.norm = RMSNorm("model.per_layer_projection_norm", config.input_width, config.eps, build)
        self.scale = config.width**-0.5

    def forward(self, tokens: Tensor, embedded: Tensor) -> tuple[Tensor, ...]:
        """Maps tokens [n] and embedded [n, width] to one [n, input_width] per layer."""
        projected = (self.project(embedded) * self.scale).unflatten(1, (-1, self.input_width))
        known = self.embedding(tokens).unflatten(1, (-1, self.input_width))
        return ((self.norm(projected) + known) * 2**-0.5).unbind(1)


class Gemma4Model(nn.Module, Model):
    """Gemma 4's decoder, with a cache group per layer kind."""

    def __init__(
        self,
        config: Gemma4Config,
        build: Build,
    ):
        super().__init__()
        self.config = config
        self.ops = build.ops
        self.dtype = build.dtype
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        widest = max(3 * layer.inner_width for layer in config.layers)
        if config.experts is not None:
            widest = max(widest + config.width, moe_activations(config.experts))
        self.activation_elements = 5 * config.width + widest + 3 * len(config.layers) * config.input_width
        self._ignored_prefixes = tuple(  # published although unused
            f"model.layers.{index}.self_attn.{name}."
            for index, layer in enumerate(config.layers)
            if layer.source != index
            for name in ("k_proj", "v_proj", "k_norm")
        )
        refuse_whole_layers(build, "Gemma 4")
        self.specs = _cache_specs(config, build)
        places = {layer: place for spec in self.specs for place, layer in enumerate(spec.layers)}
        self.embedding = Embedding(
            "model.embed_tokens", config.vocab_size, config.width, build, math.sqrt(config.width)
        )
        self.inputs = LayerInputs(config, build) if config.input_width else None
        self.layers = nn.ModuleList(
            Gemma4Layer(index, places[layer.source], config, build) for index, layer in enumerate(config.layers)
        )
        self.norm = RMSNorm("model.norm", config.width, config.eps, build)
        self.head = Head(
            "model.embed_tokens" if config.tied else "lm_head",
            config.vocab_size,
            config.width,
            build,
            softcap=config.logit_softcap,
        )
        sizes = {layer.kind: layer.head_dim for layer in config.layers}
        self.ropes = {kind: Rope(rope, sizes[kind], build) for kind, rope in config.ropes.items()}

    def num_tapped_layers(self) -> int:
        return len(self.layers)

    def ignored_prefixes(self) -> tuple[str, ...]:
        return self._ignored_prefixes

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> Gemma4Config:
        return Gemma4Config.from_hf(config)

    def forward(self, step: Step, caches: Mapping[str, Tensor]) -> Tensor:
        plans = {spec.group: plan_attention(step, spec, caches[spec.group], self.ops) for spec in self.specs}
        angles = {kind: rope.angles(step.positions) for kind, rope in self.ropes.items()}
        tables = {
            kind: angle_tables(step.positions, rope.frequencies, rope.scale, self.dtype)
            for kind, rope in self.ropes.items()
        }
        stream = self.embedding(step.tokens)
        inputs = None if self.inputs is None else self.inputs(step.tokens, stream)
        for index, (layer, layer_config) in enumerate(zip(self.layers, self.config.layers, strict=True)):
            if step.taps is not None:
                step.taps.keep(index, stream)
            given = None if inputs is None else inputs[index]
            stream = layer(
                stream, given, angles[layer_config.kind], tables[layer_config.kind], plans[layer_config.kind]
            )
        return self.norm(step.wanted(stream))

    def logits(self, hidden: Tensor) -> Tensor:
        """Maps hidden [n, width] to logits [n, vocab]."""
        return self.head(hidden)


def _layers(config: Mapping[str, Any], kinds: list[str]) -> tuple[LayerConfig, ...]:
    num_layers = len(kinds)
    heads, kv_heads = whole(config, "num_attention_heads", 8), whole(config, "num_key_value_heads", 4)
    head_dim, inner_width = whole(config, "head_dim", 256), whole(config, "intermediate_size", 9216)
    first_shared = num_layers - int(number(config, "num_kv_shared_layers", 0))
    if first_shared < 1 or not set(kinds) <= set(kinds[:first_shared]):
        what = f"num_kv_shared_layers={num_layers - first_shared} leaves some layers no keys and values to share."
        raise QuireError("bad_config", what, "Check config.json.")
    k_is_v, wide = flag(config, "attention_k_eq_v", False), flag(config, "use_double_wide_mlp", False)
    overrides = config.get("per_layer_config") or {}
    found = []
    for index, kind in enumerate(kinds):
        layer_config: Mapping[str, Any] = overrides.get(str(index), overrides.get(index)) or {}
        if kind == "full_attention" and not layer_config:
            layer_config = {
                "head_dim": whole(config, "global_head_dim", 512),
                "num_key_value_heads": config.get("num_global_key_value_heads") if k_is_v else None,
            }
        num_kv_heads, its_dim = (
            whole(layer_config, "num_key_value_heads", kv_heads),
            whole(layer_config, "head_dim", head_dim),
        )
        check_heads(heads, num_kv_heads, its_dim)
        shared = index >= first_shared
        source = next(i for i in reversed(range(first_shared)) if kinds[i] == kind) if shared else index
        width = 2 * inner_width if shared and wide else inner_width
        found.append(LayerConfig(kind, its_dim, num_kv_heads, width, source, k_is_v and kind == "full_attention"))
    return tuple(found)


def _cache_specs(config: Gemma4Config, build: Build) -> list[CacheSpec]:
    """Full-attention layers are one cache group, layers with a window another. Layers that share keys and values have
    none.
    """
    specs: list[CacheSpec] = []
    for kind in dict.fromkeys(layer.kind for layer in config.layers):
        owners = [i for i, layer in enumerate(config.layers) if layer.kind == kind and layer.source == i]
        first = config.layers[owners[0]]
        window = None if kind == "full_attention" else config.window
        specs += kv_specs(build, kind, owners, first.num_kv_heads, first.head_dim, window)
    return specs
