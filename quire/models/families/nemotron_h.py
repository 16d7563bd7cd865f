"""Nemotron-H: Mamba2 layers, attention without rope, squared-ReLU feed-forward blocks and experts, in a given
pattern.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.expert_types import GatedActivation, Routing
from quire.kernels.recurrent_types import RecurrentShape
from quire.layers.attention import Attention, AttentionShape
from quire.layers.build import Build
from quire.layers.experts import ExpertNames, Experts, MoEShape
from quire.layers.linear import Linear
from quire.layers.mlp import MLPNames, PlainMLP, check_activation
from quire.layers.moe import moe_activations
from quire.layers.norm import RMSNorm
from quire.layers.recurrent.mamba import Mamba2, MambaOptions
from quire.layers.rope import Rope, RopeConfig
from quire.layers.weights import Weight
from quire.models.families.hybrid import (
    BlockKind,
    HybridModel,
    HybridNames,
    HybridShape,
    block_activations,
    check_attention,
)
from quire.models.families.mamba2 import MambaFields
from quire.models.fields import check_layer_types, flag, number, whole
from quire.types import QuireError

FIELDS = MambaFields(
    "mamba_num_heads",
    "mamba_head_dim",
    "n_groups",
    "ssm_state_size",
    "conv_kernel",
    "use_conv_bias",
    "use_bias",
    "mamba_hidden_act",
)
STEEPNESS = 1e30  # a sigmoid this steep is 0 below 0 and 1 above
MLP_NAMES = MLPNames(("up_proj",), "down_proj")
LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
LAYER_TYPES: dict[str, BlockKind] = {
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "full_attention": "attention",
    "attention": "attention",
    "mlp": "plain",
    "moe": "plain",
}


@dataclass(frozen=True, slots=True)
class NemotronMoE:
    """The routed experts of a layer, and the width of the shared one."""

    experts: MoEShape  # its width is that of the latent space of the experts
    shared_width: int


@dataclass(frozen=True, slots=True)
class NemotronHConfig:
    """Shape and options of a Nemotron-H model."""

    shape: HybridShape
    options: MambaOptions
    inner_width: int
    mlp_bias: bool
    activation: str
    moe: NemotronMoE | None
    moe_layers: frozenset[int]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> NemotronHConfig:
        width, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads", 32)
        kv_heads = whole(config, "num_key_value_heads", heads)
        head_dim = whole(config, "head_dim", 128)
        check_attention(heads, kv_heads, head_dim)
        eps = number(config, "layer_norm_epsilon", 1e-5)
        recurrent = FIELDS.shape(config)
        shape = HybridShape.read(
            config,
            norm_eps=eps,
            max_positions=4096,
            attention=AttentionShape(width, heads, kv_heads, head_dim),
            recurrent=recurrent,
            blocks=tuple(LAYER_TYPES[kind] for kind in _layer_types(config)),
        )
        # `time_step_limit` bounds time steps, as in NVIDIA's code. transformers also applies `time_step_min`, the lower
        # bound of the initialization before training, which changes the output of heads that learned shorter steps.
        options = FIELDS.options(config, eps)
        activation = check_activation(config.get("mlp_hidden_act") or "relu2")
        moe_layers = frozenset(place for place, kind in enumerate(_layer_types(config)) if kind == "moe")
        return cls(
            shape=shape,
            options=options,
            inner_width=whole(config, "intermediate_size", 21504),
            mlp_bias=flag(config, "mlp_bias", False),
            activation=activation,
            moe=_moe(config, activation) if moe_layers else None,
            moe_layers=moe_layers,
        )


class SquaredExperts(nn.Module):
    """Experts with squared ReLU, optionally in a latent space narrower than the stream, and a shared expert.

    relu(x) squared is x * relu(x), which is a gated expert whose gate is its up projection. So the mixture's kernels
    run these experts, at the cost of storing and reading the up matrices twice.
    """

    router: Tensor
    choice_bias: Tensor

    def __init__(
        self,
        prefix: str,
        norm: RMSNorm,
        config: NemotronHConfig,
        moe: NemotronMoE,
        build: Build,
    ):
        super().__init__()
        self.norm = norm
        self.ops = build.ops
        self.routing = moe.experts.routing
        names = ExpertNames(prefix, gate="up_proj", up="up_proj")
        num, width = self.routing.num_experts, config.shape.width
        self.router = Weight.whole(f"{prefix}.{names.router}.weight", (num, width), build.dtype)
        self.choice_bias = Weight.whole(f"{prefix}.{names.choice_bias}", (num,), torch.float32)
        self.experts = Experts.from_names(names, moe.experts, build)
        self.shared = PlainMLP(
            f"{prefix}.shared_experts",
            None,
            width,
            moe.shared_width,
            bias=config.mlp_bias,
            build=build,
            activation="relu2",
            names=MLP_NAMES,
        )
        self.narrow = self.widen = None
        if moe.experts.width != width:
            narrow, widen = [(f"{prefix}.fc1_latent_proj", moe.experts.width)], [(f"{prefix}.fc2_latent_proj", width)]
            self.narrow = Linear(width, narrow, bias=config.mlp_bias, build=build)
            self.widen = Linear(moe.experts.width, widen, bias=config.mlp_bias, build=build)

    def forward(self, stream: Tensor) -> Tensor:
        """Adds the experts' outputs to stream [tokens, width]."""
        x = self.norm(stream)
        _, chosen, shares = self.ops.norm_route(x, None, 0.0, self.router, None, self.choice_bias, self.routing)
        stream = self.shared(x, stream)
        if self.narrow is None or self.widen is None:
            return self.ops.run_experts(x, self.experts.weights(), chosen, shares, stream)
        inner = self.ops.run_experts(self.narrow(x), self.experts.weights(), chosen, shares)
        return self.widen(inner, residual=stream)


class NemotronHModel(HybridModel):
    """A hybrid with one block per layer: Mamba2, attention, feed-forward or experts."""

    def __init__(
        self,
        config: NemotronHConfig,
        build: Build,
    ):
        shape = config.shape
        attention, recurrent = shape.attention, shape.recurrent
        assert isinstance(attention, AttentionShape) and isinstance(recurrent, RecurrentShape)

        def make_block(place: int, cache_index: int) -> nn.Module:
            prefix = f"backbone.layers.{place}.mixer"
            norm = RMSNorm(f"backbone.layers.{place}.norm", shape.width, shape.norm_eps, build)
            match shape.blocks[place]:
                case "recurrent":
                    return Mamba2(
                        prefix,
                        norm,
                        shape.width,
                        recurrent,
                        cache_index,
                        config.options,
                        build=build,
                    )
                case "attention":
                    return Attention(
                        prefix,
                        norm,
                        attention,
                        cache_index,
                        qkv_bias=False,
                        out_bias=False,
                        qk_norm=None,
                        build=build,
                    )
                case _ if place in config.moe_layers:
                    assert config.moe is not None
                    return SquaredExperts(prefix, norm, config, config.moe, build=build)
                case _:
                    return PlainMLP(
                        prefix,
                        norm,
                        shape.width,
                        config.inner_width,
                        bias=config.mlp_bias,
                        build=build,
                        activation=config.activation,
                        names=MLP_NAMES,
                    )

        # No rope: the recurrent layers encode positions.
        rope = Rope(RopeConfig("none"), attention.head_dim, build)
        names = HybridNames("backbone.embeddings", "backbone.norm_f")
        inner = 2 * config.inner_width
        if config.moe is not None:
            inner = max(inner, moe_activations(config.moe.experts) + 2 * config.moe.shared_width + 2 * shape.width)
        super().__init__(
            shape,
            names,
            make_block,
            rope,
            block_activations(shape, inner),
            build=build,
        )

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> NemotronHConfig:
        return NemotronHConfig.from_hf(config)


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    """Returns the type of each one-block layer, from a list of names or from the older string of letters."""
    kinds = config.get("layers_block_type") or config.get("layer_types")
    if kinds is None:
        kinds = [LETTERS.get(letter, letter) for letter in config.get("hybrid_override_pattern") or ""]
    check_layer_types(kinds, LAYER_TYPES)
    if not kinds:
        raise QuireError("bad_config", "layers_block_type names no layers.", "Check config.json.")
    return list(kinds)


def _moe(config: Mapping[str, Any], activation: str) -> NemotronMoE:
    if activation != "relu2":
        what = f"Activation {activation!r} is not supported in these experts."
        raise QuireError("unsupported_model", what, "Supported is relu2.")
    routing = Routing(
        whole(config, "n_routed_experts", 8),
        whole(config, "num_experts_per_tok", 2),
        score="sigmoid",
        normalise=flag(config, "norm_topk_prob", True),
        scale=number(config, "routed_scaling_factor", 1.0),
        num_groups=whole(config, "n_group", 1),
        top_groups=whole(config, "topk_group", 1),
        group_members=2,
    )
    width = whole(config, "moe_latent_size", whole(config, "hidden_size"))
    experts = MoEShape(width, whole(config, "moe_intermediate_size", 7688), routing, GatedActivation(alpha=STEEPNESS))
    return NemotronMoE(experts, whole(config, "moe_shared_expert_intermediate_size", 7688))
