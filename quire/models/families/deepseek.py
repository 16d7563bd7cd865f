"""DeepSeek V2 and V3, Kimi K2, GLM-4.7 Flash: latent attention, and in all but the first layers routed experts and
shared experts. MiniCPM 3 and Youtu have the same attention and no experts.

The registry names `DeepSeekModel`. The latent is one paged cache group: a page holds, per token and layer, one vector
that all heads read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from quire.kernels.angles import Angles
from quire.kernels.expert_types import Routing
from quire.layers.attention import AttentionPlan, plan_attention, plan_sampled_attention
from quire.layers.build import Build
from quire.layers.embedding import Embedding, Head
from quire.layers.experts import ExpertNames, MoEShape
from quire.layers.latent import Form, LatentAttention, LatentShape, latent_spec
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MoE, moe_activations
from quire.layers.norm import RMSNorm
from quire.layers.rope import Rope, RopeConfig, yarn_magnitude
from quire.layers.step import Step
from quire.layers.weights import scale_by, set_forms
from quire.models.families.moe_families import draft_layers, shared_beside_routed, sparse_layers
from quire.models.fields import above_zero, check_layer_types, check_silu, flag, number, whole
from quire.models.model import Model
from quire.models.mtp_head import HeadForm, deepseek_form
from quire.models.stages import WHOLE, Stage, keep_layers
from quire.types import QuireError

EMBEDDING = "model.embed_tokens"
_V3 = {
    "q_lora_rank": 1536,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
}
DEFAULTS: dict[str, dict[str, Any]] = {  # values of fields that config.json may omit
    "deepseek_v2": {"q_lora_rank": 1536, "n_shared_experts": 2},
    "deepseek_v3": _V3,
    "kimi_k2": _V3,  # its files have DeepSeek V3's architecture under a model type of their own
    "glm4_moe_lite": {
        "q_lora_rank": 768,
        "n_shared_experts": 1,
        "rms_norm_eps": 1e-5,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
    },
    "minicpm3": {
        "q_lora_rank": 768,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_interleave": False,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "max_position_embeddings": 32768,
    },
    "youtu": {"q_lora_rank": 1536, "tie_word_embeddings": True},
}
WITHOUT_EXPERTS = ("minicpm3", "youtu")


@dataclass(frozen=True, slots=True)
class DeepSeekConfig:
    """Shape and options of a model with latent attention."""

    vocab_size: int
    num_layers: int
    norm_eps: float
    max_positions: int
    rope: RopeConfig
    attention: LatentShape
    dense_width: int  # of the feed-forward blocks without experts
    sparse_layers: frozenset[int]  # layers with experts
    moe: MoEShape | None  # None: no layer has experts
    ignored_tensors: tuple[str, ...]  # prefixes of tensors that are ignored
    tied: bool
    mlp_bias: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of each block's output; multiplied into the last matrix while loading
    logit_scale: float = 1.0
    form: Form = "absorbed"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DeepSeekConfig:
        config = _with_defaults(config)
        check_silu(config)
        rope = RopeConfig.from_hf(dict(config))
        max_positions = whole(config, "max_position_embeddings", 2048)
        if rope.kind == "yarn":
            max_positions = max(max_positions, int(rope.original_len * rope.factor))
        num_layers = whole(config, "num_hidden_layers")
        check_layer_types(config.get("layer_types"), ("full_attention",), num_layers)
        has_experts = config["model_type"] not in WITHOUT_EXPERTS
        latent = cls(
            vocab_size=whole(config, "vocab_size"),
            num_layers=num_layers,
            norm_eps=number(config, "rms_norm_eps", 1e-6),
            max_positions=max_positions,
            rope=rope,
            attention=_attention(config, rope),
            dense_width=whole(config, "intermediate_size"),
            sparse_layers=sparse_layers(config, num_layers) if has_experts else frozenset(),
            moe=_experts(config) if has_experts else None,
            ignored_tensors=draft_layers(config, num_layers),
            tied=flag(config, "tie_word_embeddings", False),
        )
        return _minicpm(config, latent) if config["model_type"] == "minicpm3" else latent


class DeepSeekLayer(nn.Module):
    """Latent attention, and a feed-forward block or experts."""

    def __init__(self, index: int, cache_index: int, config: DeepSeekConfig, build: Build):
        super().__init__()
        prefix, width = f"model.layers.{index}", config.attention.width
        norm = RMSNorm(f"{prefix}.input_layernorm", width, config.norm_eps, build)
        self.attention = LatentAttention(
            f"{prefix}.self_attn", norm, config.attention, cache_index, form=config.form, build=build
        )
        scale = scale_by(config.residual_scale)
        set_forms(self.attention.out, (scale,))
        norm = RMSNorm(f"{prefix}.post_attention_layernorm", width, config.norm_eps, build)
        self.mlp: nn.Module
        if config.moe is None or index not in config.sparse_layers:
            inner, bias = config.dense_width, config.mlp_bias
            self.mlp = GatedMLP(f"{prefix}.mlp", norm, width, inner, bias=bias, build=build)
            set_forms(self.mlp.down, (scale,))
        else:
            names = ExpertNames(f"{prefix}.mlp", shared="shared_experts")
            self.mlp = MoE(names, norm, config.moe, build=build)

    def forward(self, stream: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        """Runs a layer over stream [tokens, width]. After attention only the tokens that `plan` selects remain."""
        stream = self.attention(stream, angles, plan)
        return self.mlp(stream) if len(stream) else stream


class DeepSeekModel(nn.Module, Model):
    """A decoder of latent attention layers with one cache group."""

    def __init__(
        self,
        config: DeepSeekConfig,
        build: Build,
    ):
        super().__init__()
        self.config = config
        self._ignored_prefixes = config.ignored_tensors
        self.ops = build.ops
        self.stage = WHOLE
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        shape = config.attention
        mixture = 0 if config.moe is None else moe_activations(config.moe)
        blocks = max(shape.activation_elements, 3 * config.dense_width, mixture)
        self.activation_elements = 4 * shape.width + blocks
        self.specs = [latent_spec(shape, config.form, tuple(range(config.num_layers)), build)]
        self.embedding = Embedding(EMBEDDING, config.vocab_size, shape.width, build, config.embedding_scale)
        self.layers = nn.ModuleList(DeepSeekLayer(index, index, config, build) for index in range(config.num_layers))
        self.norm = RMSNorm("model.norm", shape.width, config.norm_eps, build)
        head = EMBEDDING if config.tied else "lm_head"
        self.head = Head(head, config.vocab_size, shape.width, build, scale=config.logit_scale)
        self.rope = Rope(config.rope, shape.rope_dim, build)

    def head_form(self) -> HeadForm:
        config, index = self.config, self.config.num_layers
        # The layer after the last has experts if the model has any.
        more = replace(config, sparse_layers=config.sparse_layers | ({index} if config.moe is not None else set()))
        return deepseek_form(
            f"model.layers.{index}",
            config.attention.width,
            config.norm_eps,
            lambda build: DeepSeekLayer(index, 0, more, build),
            self.specs[0],
            self.rope,
            tied=config.tied,
        )

    def num_tapped_layers(self) -> int:
        return len(self.layers)

    def ignored_prefixes(self) -> tuple[str, ...]:
        return self._ignored_prefixes

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> DeepSeekConfig:
        return DeepSeekConfig.from_hf(config)

    def forward(self, step: Step, caches: Mapping[str, Tensor]) -> Tensor:
        """Computes the step's tokens and writes their latents to the cache; returns the selected hidden states, [n,
        width].
        """
        plan = plan_attention(step, self.specs[0], caches["latent"], self.ops)
        angles = self.rope.angles(step.positions)
        stream = self.embedding(step.tokens) if step.stream is None else step.stream
        for index, layer in enumerate(self.layers[:-1]):
            if step.taps is not None:
                step.taps.keep(index, stream)
            stream = layer(stream, angles, plan)
        if step.taps is not None:
            step.taps.keep(len(self.layers) - 1, stream)
        if not self.stage.is_last:
            return self.layers[-1](stream, angles, plan)
        last = plan_sampled_attention(plan, step, self.specs[0], caches["latent"], self.ops)
        stream = self.layers[-1](stream, angles, last)
        return self.norm(stream) if len(stream) else stream

    def take_stage(self, stage: Stage) -> None:
        kept = stage.layers(self.config.num_layers)
        self.stage = stage
        self.layers = nn.ModuleList(list(self.layers)[kept.start : kept.stop])
        self.specs = keep_layers(self.specs, kept)
        layers: Any = self.layers
        for place, layer in enumerate(layers):
            layer.attention.cache_index = place
        if not stage.is_first:
            del self.embedding
        if not stage.is_last:
            del self.norm, self.head

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


def _with_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config completed with the model type's defaults."""
    config = {**DEFAULTS.get(config["model_type"], {}), **config}
    if config["model_type"] == "minicpm3" and config.get("v_head_dim") is None:
        config["v_head_dim"] = whole(config, "hidden_size") // whole(config, "num_attention_heads")
    return config


def _minicpm(config: Mapping[str, Any], latent: DeepSeekConfig) -> DeepSeekConfig:
    """Applies MiniCPM's multipliers, which depend on depth and width. Null means no multiplier."""
    width, depth = latent.attention.width, math.sqrt(latent.num_layers)
    return replace(
        latent,
        mlp_bias=flag(config, "mlp_bias", False),
        embedding_scale=number(config, "scale_emb", 12.0),
        residual_scale=number(config, "scale_depth", depth) / depth,
        logit_scale=above_zero(config, "dim_model_base", width) / width,
    )


def _attention(config: Mapping[str, Any], rope: RopeConfig) -> LatentShape:
    score_factor = 1.0
    scaling = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    if rope.kind != "default" and scaling.get("mscale_all_dim"):
        score_factor = yarn_magnitude(rope.factor, number(scaling, "mscale_all_dim", 0.0)) ** 2
    return read_latent(config, score_factor=score_factor, interleaved=flag(config, "rope_interleave", True))


def read_latent(config: Mapping[str, Any], *, score_factor: float = 1.0, interleaved: bool = False) -> LatentShape:
    """Reads the shape of latent attention. `score_factor`: factor on the usual scale of scores."""
    q_rank = None if config.get("q_lora_rank") is None else whole(config, "q_lora_rank")
    bias = flag(config, "attention_bias", False)
    if bias and q_rank is None:
        what = f"A {config['model_type']} model with attention_bias and without q_lora_rank is not supported."
        raise QuireError("unsupported_model", what, "No published model has both.")
    nope_dim, rope_dim = whole(config, "qk_nope_head_dim"), whole(config, "qk_rope_head_dim")
    if rope_dim % 2:
        raise QuireError("bad_config", f"qk_rope_head_dim={rope_dim} must be even.", "Check config.json.")
    return LatentShape(
        width=whole(config, "hidden_size"),
        num_heads=whole(config, "num_attention_heads"),
        rank=whole(config, "kv_lora_rank"),
        q_rank=q_rank,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=whole(config, "v_head_dim"),
        scale=(nope_dim + rope_dim) ** -0.5 * score_factor,
        interleaved=interleaved,
        bias=bias,
    )


def _experts(config: Mapping[str, Any]) -> MoEShape:
    """Reads the experts. V2 chooses by softmax, within the groups that have the best expert if groups limit the choice;
    V3 is `shared_beside_routed`.
    """
    if config["model_type"] != "deepseek_v2":
        return shared_beside_routed(config)
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        what = f"topk_method={method!r} of deepseek_v2 is not supported."
        raise QuireError("unsupported_model", what, "Supported are greedy and group_limited_greedy.")
    grouped = method == "group_limited_greedy"
    routing = Routing(
        num_experts=whole(config, "n_routed_experts"),
        top_k=whole(config, "num_experts_per_tok"),
        normalise=False,
        scale=number(config, "routed_scaling_factor", 1.0),
        num_groups=whole(config, "n_group", 1) if grouped else 1,
        top_groups=whole(config, "topk_group", 1) if grouped else 1,
        exact=True,
    )
    inner = whole(config, "moe_intermediate_size")
    shared = inner * (config.get("n_shared_experts") or 0)
    return MoEShape(whole(config, "hidden_size"), inner, routing, shared_width=shared)
