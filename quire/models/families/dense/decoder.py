"""The dense decoder: Llama, and the families that differ from it by `DenseConfig` alone. `families` lists them.

The registry names `DenseModel`. The loader builds it on meta and fills it; the runtime calls `forward` and `logits`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from quire.kernels.angles import Angles
from quire.layers.adapters import Adapter
from quire.layers.attention import (
    Attention,
    AttentionPlan,
    AttentionShape,
    plan_attention,
    plan_sampled_attention,
)
from quire.layers.build import Build
from quire.layers.embedding import Embedding, Head
from quire.layers.head_layout import HeadOrder
from quire.layers.kv_specs import kv_specs
from quire.layers.mlp import GatedMLP, PlainMLP
from quire.layers.norm import HeadLayerNorm, LayerNorm, Norm, PostRopeQKNorm, QKNorm, RMSNorm, WideQKNorm
from quire.layers.residual_join import ResidualJoin
from quire.layers.rope import Rope, RopeConfig
from quire.layers.stack import (
    Products,
    fits_stack,
    list_products,
    make_adapter_hook,
    make_stack,
    pack_adapter,
    plan_layer,
    run_stack,
    splits_in_stack,
)
from quire.layers.step import Step
from quire.models.families.dense.config import DenseConfig
from quire.models.families.dense.families import read_dense
from quire.models.model import Model
from quire.models.mtp_head import HeadForm
from quire.models.stages import WHOLE, Stage, keep_layers
from quire.types import CacheSpec

if TYPE_CHECKING:
    from quire.kernels.native.adapters import PackedAdapter
    from quire.kernels.native.stack import Stack

# Builds the module in place of a layer's feed-forward block from the layer's index, the norm before the block and the
# join that adds its output to the residual stream. None: the layer keeps its feed-forward block. The module is called
# like the block.
FeedForward = Callable[[int, Norm | None, ResidualJoin], nn.Module | None]


class DenseLayer(nn.Module):
    """One layer: attention and a feed-forward block, in sequence or in parallel."""

    def __init__(
        self,
        index: int,
        cache_index: int,
        config: DenseConfig,
        build: Build,
        feed_forward: FeedForward | None,
    ):
        super().__init__()
        prefix = f"{config.names.layers}.{index}"
        attention = f"{prefix}.{config.attention_names.block}"

        def norm(name: str | None) -> Norm | None:
            return None if name is None else make_norm(f"{prefix}.{name}", config, build)

        order = _head_order(config, config.ropes[index])
        self.parallel = config.parallel
        self.attention = Attention(
            attention,
            norm(config.norms.before_attention),
            AttentionShape(
                config.width,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                config.attention_scale,
                config.attention_softcap,
                order,
                config.sinks,
                config.clip,
            ),
            cache_index,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
            qk_norm=_qk_norm(attention, config, order, build),
            build=build,
            names=config.attention_names,
            join=ResidualJoin(norm(config.norms.after_attention), config.residual_scale),
        )
        mlp_norm, join = (
            norm(config.norms.before_mlp),
            ResidualJoin(norm(config.norms.after_mlp), config.residual_scale),
        )
        mlp = None if feed_forward is None else feed_forward(index, mlp_norm, join)
        self.mlp = mlp or (GatedMLP if config.gated else PlainMLP)(
            f"{prefix}.mlp",
            mlp_norm,
            config.width,
            config.inner_width,
            bias=config.mlp_bias,
            build=build,
            activation=config.activation,
            names=config.mlp_names,
            join=join,
        )

    def forward(self, stream: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        """Adds both blocks' outputs to the residual stream [tokens, width]."""
        if self.parallel:
            before = plan.pick(stream.clone())  # attention may write its sum into the stream's memory
            stream = self.attention(stream, angles, plan)
            return self.mlp(before, onto=stream) if len(stream) else stream
        stream = self.attention(stream, angles, plan)
        return self.mlp(stream) if len(stream) else stream  # the stream is empty if no token is selected


class DenseModel(nn.Module, Model):
    """A decoder of `DenseLayer`s with one cache group per window size."""

    def __init__(
        self,
        config: DenseConfig,
        *,
        build: Build,
        feed_forward: FeedForward | None = None,
    ):
        super().__init__()
        self.config = config
        self.ops = build.ops
        self.communicator = build.communicator
        self.stage = WHOLE
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        gates = 0 if config.attention_names.gate is None else config.num_heads
        heads = (2 * config.num_heads + 2 * config.num_kv_heads + gates) * config.head_dim
        self.activation_elements = 4 * config.width + max(heads, 3 * config.inner_width)
        self.specs = _cache_specs(config, build)
        places = {layer: (spec.group, place) for spec in self.specs for place, layer in enumerate(spec.layers)}
        names, vocab_size, width = config.names, config.vocab_size, config.width
        self.embedding = Embedding(names.embedding, vocab_size, width, build, config.embedding_scale)
        self.layers = nn.ModuleList(
            DenseLayer(index, places[index][1], config, build, feed_forward) for index in range(config.num_layers)
        )
        self.layer_groups = [places[index][0] for index in range(config.num_layers)]
        self.norm = make_norm(names.final_norm, config, build)
        self.head = Head(
            names.embedding if config.tied else names.head,
            vocab_size,
            width,
            build,
            bias=config.head_bias,
            scale=config.logit_scale,
            softcap=config.logit_softcap,
        )
        kinds = list(dict.fromkeys(config.ropes))
        unrotated = config.head_dim - config.rope_dim
        self.ropes = [Rope(kind, config.head_dim, build, unrotated) for kind in kinds]
        self.layer_ropes = [kinds.index(rope) for rope in config.ropes]

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> Any:
        return read_dense(config)

    @classmethod
    def fits_native(cls, config: DenseConfig) -> bool:
        """Returns whether the native CPU library can run all layers in one call, whatever the scheme of the weights."""
        return cls is DenseModel and not config.sinks and has_native_attention(config)

    def forward(self, step: Step, caches: Mapping[str, Tensor]) -> Tensor:
        """Computes the step's tokens and writes their keys and values to `caches`, one tensor per group: [layers, 2,
        pages, page_tokens, kv_heads, head_dim]. Returns the selected normed hidden states, [n, width].
        """
        if self.stack is not None and step.taps is None:
            pool, hook = step.adapters, None
            looks_up = self.communicator.size > 1 and step.stream is None
            if pool is not None and pool.route is not None:
                hook = make_adapter_hook(self.stack.native, pool, pool.route)
                looks_up = looks_up or (self.embedding.adapters is not None and self.embedding.adapters.is_used)
            vectors = self.embedding(step.tokens) if looks_up else step.stream
            return run_stack(self.stack, step, self.specs, caches, vectors, hook)
        here = [spec for spec in self.specs if spec.layers]
        plans = {spec.group: plan_attention(step, spec, caches[spec.group], self.ops) for spec in here}
        if self.config.query_scaling is not None:
            query_scale = self.config.query_scaling.at(step.positions)
            plans = {group: replace(plan, query_scale=query_scale) for group, plan in plans.items()}
        angles = [rope.angles(step.positions) for rope in self.ropes]
        stream = self.embedding(step.tokens) if step.stream is None else step.stream
        *groups, last = self.layer_groups
        for index, (layer, group, rope) in enumerate(zip(self.layers, groups, self.layer_ropes, strict=False)):
            if step.taps is not None:
                step.taps.keep(index, stream)
            stream = layer(stream, angles[rope], plans[group])
        if step.taps is not None:
            step.taps.keep(len(groups), stream)
        plan = plans[last]
        if self.stage.is_last:
            spec = next(spec for spec in self.specs if spec.group == last)
            plan = plan_sampled_attention(plan, step, spec, caches[last], self.ops)
        stream = self.layers[-1](stream, angles[self.layer_ropes[-1]], plan)
        return self.norm(stream) if self.stage.is_last and len(stream) else stream

    def take_stage(self, stage: Stage) -> None:
        config = self.config
        heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        layer_weights = config.width * (heads + (3 if config.gated else 2) * config.inner_width)
        kept = stage.layers(config.num_layers, head=config.vocab_size * config.width / layer_weights)
        self.stage = stage
        self.layers = nn.ModuleList(list(self.layers)[kept.start : kept.stop])
        self.layer_groups, self.layer_ropes = (
            self.layer_groups[kept.start : kept.stop],
            self.layer_ropes[kept.start : kept.stop],
        )
        self.specs = keep_layers(self.specs, kept)
        places = {index: place for spec in self.specs for place, index in enumerate(spec.layers)}
        layers: Any = self.layers
        for index, layer in zip(kept, layers, strict=True):
            layer.attention.cache_index = places[index]
        if not stage.is_first:
            del self.embedding
        if not stage.is_last:
            del self.norm, self.head

    def num_tapped_layers(self) -> int:
        return len(self.layers)

    def head_form(self) -> HeadForm | None:
        config = self.config
        if config.mtp_layers is None:
            return None
        layer = f"{config.mtp_layers}.0"
        # A layer under this prefix instead of the model's, with a window or rope of its own in no published model.
        names = replace(config.names, layers=config.mtp_layers)
        alone = replace(config, names=names, ropes=config.ropes[-1:], windows=(None,))
        return HeadForm(
            embed_norm=f"{layer}.token_layernorm",
            hidden_norm=f"{layer}.hidden_layernorm",
            project=f"{layer}.input_proj",
            norm=f"{layer}.final_layernorm",
            width=config.width,
            norm_eps=config.norm.eps,
            make_layer=lambda build: DenseLayer(0, 0, alone, build, None),
            spec=replace(self.specs[0], window=None),
            rope=self.ropes[self.layer_ropes[-1]],
            hidden_first=True,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Maps hidden [n, width] to logits [n, vocab]."""
        return self.head(hidden)

    @cached_property
    def stack(self) -> Stack | None:
        """All layers as one native call, where the ops have it. Built at the first step, once weights are real."""
        if self.ops.native is None or not self.runs_as_one_call():
            return None
        reduction = self.communicator.reduction()
        if self.communicator.size > 1 and (reduction is None or not all(map(splits_in_stack, self.layers))):
            return None
        groups = [spec.group for spec in self.specs]
        layers: Any = list(self.layers)
        plans = [
            plan_layer(layer.attention, layer.mlp, groups.index(group), rope)
            for layer, group, rope in zip(layers, self.layer_groups, self.layer_ropes, strict=True)
        ]
        return make_stack(
            self.ops,
            self.embedding if self.stage.is_first else None,
            plans,
            self.norm if self.stage.is_last else None,
            self.ropes,
            layers[0].attention,
            activation=self.config.activation,
            has_gate=self.config.gated,
            is_parallel=self.config.parallel,
            takes_mean=self.config.norm.kind != "rms",
            eps=self.config.norm.eps,
            reduction=reduction,
        )

    @cached_property
    def stack_products(self) -> Products:
        """The linear layers behind the stack's products, for adapters."""
        return list_products(list(self.layers))

    def pack_adapter(self, adapter: Adapter) -> PackedAdapter | None:
        if self.stack is None:
            return None
        return pack_adapter(self.stack.native, adapter, self.stack_products, len(self.layers))

    def runs_as_one_call(self) -> bool:
        """Returns whether the native library runs all layers in one call. Mixtures qualify if their experts are in
        blocks.
        """
        if type(self) is DenseModel:
            return self.fits_native(self.config)
        blocks = (fits_stack(layer.mlp) for layer in self.layers if isinstance(layer, DenseLayer))
        return has_native_attention(self.config) and not self.config.parallel and all(blocks)


def has_native_attention(config: DenseConfig) -> bool:
    """Returns whether the native library's stack supports this kind of attention."""
    from quire.kernels.native.library import MAX_GROUP

    if config.head_norms is not None or config.clip is not None or config.query_scaling is not None:
        return False
    if config.attention_names.gate is not None or config.qk_norm == "after_rope":
        return False
    return config.num_heads // config.num_kv_heads <= MAX_GROUP


def _cache_specs(config: DenseConfig, build: Build) -> list[CacheSpec]:
    """Returns one cache group per window size: full-attention layers are one, layers with a window another. Layers that
    stay whole in a packed cache are groups of their own."""
    num_kv_heads = build.heads(config.num_heads, config.num_kv_heads).num_kv_heads
    specs: list[CacheSpec] = []
    for window in sorted(set(config.windows), key=lambda window: window or 0):
        group = "full" if window is None else "window"
        layers = [index for index, other in enumerate(config.windows) if other == window]
        specs += kv_specs(build, group, layers, num_kv_heads, config.head_dim, window)
    return specs


def make_norm(name: str, config: DenseConfig, build: Build) -> Norm:
    """Builds a norm of the residual stream in the family's style."""
    style = config.norm
    if style.kind == "rms":
        return RMSNorm(name, config.width, style.eps, build, style.offset)
    return LayerNorm(name, config.width, style.eps, build, weight=style.weight, bias=style.bias, offset=style.offset)


def _head_order(config: DenseConfig, rope: RopeConfig) -> HeadOrder | None:
    """Returns how the checkpoint orders the elements of a head; None: as Quire does."""
    if config.rope_dim == config.head_dim and not config.rope_interleaved:
        return None
    return HeadOrder(config.head_dim, config.rope_dim, config.rope_interleaved, rope.angle_scale)


def _qk_norm(
    prefix: str, config: DenseConfig, order: HeadOrder | None, build: Build
) -> QKNorm | HeadLayerNorm | WideQKNorm | None:
    """Builds the norm of queries and keys; None: the family has none."""
    style, names = config.norm, config.attention_names.head_norms
    if config.head_norms is not None:
        num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        return HeadLayerNorm(prefix, config.head_norms, num_heads, num_kv_heads, head_dim, style.eps, build, order)
    match config.qk_norm:
        case "head":
            return QKNorm(prefix, config.head_dim, style.eps, build, offset=style.offset, order=order, names=names)
        case "after_rope":
            return PostRopeQKNorm(prefix, config.head_dim, style.eps, build, order=order, names=names)
        case "wide":
            q_width, k_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
            return WideQKNorm(prefix, q_width, k_width, config.head_dim, style.eps, build, order)
    return None
