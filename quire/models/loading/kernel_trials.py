"""Selects the kernels that a model is built with: every op that its layers use is tried on its shapes first.

The loader calls `select_kernels` with a model on meta, whose modules determine the ops and shapes. Hopper-only kernels
come first, so that the kernels they replace are not compiled in vain. Then each op must agree with its reference or is
replaced by it (`kernels.validation`). Last come the kernels that are taken only if they are also faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.activations import Curve
from quire.kernels.table import DETERMINISTIC, LIBRARY_NAMES, REFERENCE, Ops
from quire.kernels.validation.expert_trials import ExpertsTrialShape, list_expert_trials
from quire.kernels.validation.gated_trial import GatedTrialShape, settle_gated
from quire.kernels.validation.latent_trials import LatentTrialShape, list_latent_trials, settle_latent
from quire.kernels.validation.prefill_trial import settle_prompts
from quire.kernels.validation.recurrent_trials import (
    MambaTrialShape,
    channel_delta_trial,
    delta_net_trial,
    mamba_trial,
    settle_channel_delta,
    settle_delta_net,
    settle_mamba,
    short_conv_trial,
)
from quire.kernels.validation.trial_results import Findings
from quire.kernels.validation.trials import (
    FEW_TOKENS,
    FP8_TOLERANCE,
    KernelTrial,
    Product,
    TrialShape,
    attention_trial,
    compare,
    finish_writes,
    gate_mul_trial,
    norm_add_trial,
    norm_trial,
    normal,
    product_trial,
    rope_trial,
    settle_ops,
)
from quire.layers.attention import AttentionShape
from quire.layers.build import Build
from quire.layers.experts import Experts
from quire.layers.latent import LatentAttention
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MoE, SharedExpert
from quire.layers.norm import QKNorm, RMSNorm
from quire.layers.quant import Dense, Fp8
from quire.layers.quant.scheme import Scaled
from quire.layers.recurrent.channel_delta import ChannelDeltaNet
from quire.layers.recurrent.gated_delta import GatedDeltaNet
from quire.layers.recurrent.mamba import Mamba2
from quire.layers.recurrent.short_conv import ShortConv
from quire.layers.residual_join import ResidualJoin
from quire.layers.weights import put_weight
from quire.models.fallback.model import FallbackModel
from quire.models.families.dense.decoder import DenseModel
from quire.types import CacheSpec


@dataclass(frozen=True, slots=True)
class Trials:
    """Derives the trials of one model on one device from the model's modules."""

    model: Any  # a `registry.Model` on meta
    dtype: torch.dtype  # of the computation
    device: torch.device
    max_len: int  # maximum tokens in a row; determines the width of page tables

    def rows(self) -> Iterator[KernelTrial]:
        """Yields a trial for each op that the first request launches."""
        if isinstance(self.model, FallbackModel):  # the rest of a transformers model runs in torch
            for shape in self.attention():
                yield attention_trial(shape, self.device)
            return
        yield from self._norms_and_products()
        for shape in self.attention():
            yield rope_trial(shape, self.device)
            yield attention_trial(shape, self.device)
        if (latent := self.latent()) is not None:
            yield from list_latent_trials(latent, self.device)
        if (net := self.delta_net()) is not None:
            yield delta_net_trial(net.shape, self.dtype, self.device)
        if (by_channel := self.channel_delta()) is not None:
            yield channel_delta_trial(by_channel.shape, self.dtype, self.device)
        if (mamba := self.mamba()) is not None:
            yield mamba_trial(mamba, self.device)
        if (short := self._first(ShortConv)) is not None:
            yield short_conv_trial(short.shape, short.conv_bias is not None, self.dtype, self.device)
        if (mixture := self._mixture()) is not None:
            yield from list_expert_trials(mixture, self.device)

    def attention(self) -> list[TrialShape]:
        """Returns one shape per cache group whose layers attend to keys and values."""
        if isinstance(self.model, FallbackModel):
            return [self._fallback_shape(spec) for spec in self.model.paged_specs if not self.model.gathers]
        layers = [module for module in self._modules() if isinstance(getattr(module, "shape", None), AttentionShape)]
        found = []
        for spec in self.model.specs:
            fitting = (each for each in layers if (each.shape.num_kv_heads, each.shape.head_dim) == spec.shape)
            if spec.kind == "paged" and (layer := next(fitting, None)) is not None:
                found.append(self._attention_shape(layer, spec))
        return found

    def latent(self) -> LatentTrialShape | None:
        """Returns the shape of latent attention; None if the model has none, or does not use the absorbed form."""
        layer = self._first(LatentAttention)
        if layer is None or layer.form != "absorbed":
            return None
        shape, spec = layer.shape, next(spec for spec in self.model.specs if spec.kind == "paged")
        return LatentTrialShape(
            shape.num_heads,
            shape.rank,
            shape.rope_dim,
            spec.page_tokens,
            self.dtype,
            getattr(torch, spec.dtype),
            self.max_len,
            shape.nope_dim,
            shape.q_rank,
            shape.interleaved,
            shape.value_dim,
        )

    def delta_net(self) -> GatedDeltaNet | None:
        return self._first(GatedDeltaNet)

    def channel_delta(self) -> ChannelDeltaNet | None:
        return self._first(ChannelDeltaNet)

    def largest_gate_up(self) -> GatedTrialShape | None:
        """Returns the largest gate/up projection with a plain weight and no bias."""
        blocks = [block for block in self._modules() if isinstance(block, GatedMLP)]
        plain = [each for each in blocks if isinstance(each.gate_up.scheme, Dense) and each.gate_up.bias is None]
        if not plain:
            return None
        largest = max(plain, key=lambda each: each.gate_up.in_features * each.gate_up.out_features)
        return GatedTrialShape(largest.gate_up.in_features, largest.gate_up.out_features, self.dtype, largest.curve)

    def _norms_and_products(self) -> Iterator[KernelTrial]:
        finals = (module for name, module in self._children() if name == "norm" and isinstance(module, RMSNorm))
        norm = next(finals, None) or self._first(RMSNorm)
        if norm is not None:
            yield norm_trial(norm.weight.shape[0], self.dtype, norm.weight.dtype, self.device)
        joins = (each.norm for each in self._modules() if isinstance(each, ResidualJoin))
        if (added := next((each for each in joins if isinstance(each, RMSNorm)), None)) is not None:
            yield norm_add_trial(added.weight.shape[0], self.dtype, added.weight.dtype, self.device)
        product = self._product()
        if product is not None:
            if product.gate is not None:
                yield gate_mul_trial(product.out_features // 2, product.gate, self.dtype, self.device)
            yield product_trial(product, self.device)
        scaled = next(
            (each for each in self._modules() if isinstance(each, Linear) and isinstance(each.scheme, Fp8)), None
        )
        if scaled is not None:  # no other kernel reads FP8 weights, so there is no reference to fall back to
            yield KernelTrial("FP8 product", lambda ops: self._try_scaled(scaled, None), None)
        blocks = (each for each in self._modules() if isinstance(each, SharedExpert | GatedMLP))
        gated = next((each for each in blocks if isinstance(each.gate_up.scheme, Fp8)), None)
        if gated is not None:
            yield KernelTrial(
                "FP8 product with its gate", lambda ops: self._try_scaled(gated.gate_up, gated.curve), None
            )

    def _try_scaled(self, like: Linear, gate: Curve | None) -> None:
        """Compares an FP8 product of many rows and of one, with the norm before it, to plain torch. Raises if they
        differ.
        """
        weight = normal(self.device, self.dtype, like.out_features, like.in_features) * like.in_features**-0.5
        build = Build.plain(self.dtype, REFERENCE, like.scheme)
        norm = RMSNorm("trial", like.in_features, 1e-6, build)
        linear = Linear(like.in_features, [("trial", like.out_features)], build=build)
        put_weight(norm, "weight", normal(self.device, self.dtype, like.in_features))
        put_weight(linear, "weight", weight)
        finish_writes(self.device)
        linear.finish()
        for num_rows in (FEW_TOKENS, 1):
            x = normal(self.device, self.dtype, num_rows, like.in_features)
            finish_writes(self.device)
            got = linear(x, norm=norm, gate=gate)
            if isinstance(got, Scaled):  # its columns are zero-padded where the kernels need it
                got = (got.values.float() * got.scale[:, None])[:, : like.out_features // 2]
            compare(got, partial(_reference_product, norm, x, weight, gate), self.dtype, FP8_TOLERANCE)

    def _product(self) -> Product | None:
        """Returns the first gate/up projection with a plain weight; without one, the first output projection of an
        attention or recurrent layer.
        """
        for block in self._modules():
            if isinstance(block, SharedExpert | GatedMLP):
                linear = block.gate_up
                norm = getattr(block, "norm", None)
                norm_dtype = norm.weight.dtype if isinstance(norm, RMSNorm) else None
                if isinstance(linear.scheme, Dense):
                    return Product(
                        linear.in_features,
                        linear.out_features,
                        self.dtype,
                        norm_dtype,
                        linear.bias is not None,
                        gate=block.curve,
                    )
        for block in self._modules():
            out, join = getattr(block, "out", None), getattr(block, "join", None)
            if isinstance(out, Linear) and isinstance(out.scheme, Dense):
                added = join is None or (join.norm is None and join.scale == 1.0)
                return Product(out.in_features, out.out_features, self.dtype, bias=out.bias is not None, residual=added)
        return None

    def _attention_shape(self, layer: Any, spec: CacheSpec) -> TrialShape:
        shape: AttentionShape = layer.shape
        norms = (getattr(layer, name, None) for name in ("head_norm", "qk_norm"))
        weight = next((norm.q_weight for norm in norms if isinstance(norm, QKNorm)), getattr(layer, "q_weight", None))
        return TrialShape(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            page_tokens=spec.page_tokens,
            window=spec.window,
            qk_norm=weight is not None,
            dtype=self.dtype,
            cache_dtype=getattr(torch, spec.dtype),
            max_len=self.max_len,
            qk_dtype=None if weight is None else weight.dtype,
            softcap=shape.softcap,
            sinks=shape.sinks,
        )

    def _fallback_shape(self, spec: CacheSpec) -> TrialShape:
        """Returns the shape of an attention layer in a transformers model."""
        layer = self.model.layer_shapes[spec.layers[0]]
        return TrialShape(
            num_heads=layer.num_heads,
            num_kv_heads=spec.shape[0],
            head_dim=spec.shape[1],
            page_tokens=spec.page_tokens,
            window=spec.window,
            qk_norm=False,
            dtype=self.dtype,
            cache_dtype=getattr(torch, spec.dtype),
            max_len=self.max_len,
            softcap=layer.softcap,
            sinks=layer.sinks,
        )

    def mamba(self) -> MambaTrialShape | None:
        layer = self._first(Mamba2)
        if layer is None:
            return None
        options = layer.options
        return MambaTrialShape(
            layer.shape,
            options.norm_groups,
            options.conv_bias,
            options.dt_limits,
            self.dtype,
            options.norm,
            options.gate_first,
        )

    def _mixture(self) -> ExpertsTrialShape | None:
        for block in self._modules():
            experts = getattr(block, "experts", None)
            if isinstance(experts, Experts):
                # Only `MoE` norms the residual stream through `norm`. Other mixtures do it elsewhere, or norm the
                # router's input only.
                norm = block.norm if isinstance(block, MoE) else None
                weight = norm.weight if isinstance(norm, RMSNorm) else getattr(block, "router_norm", None)
                before_stream = (getattr(block, name, None) for name in ("widen", "after_experts"))
                added = block.experts_add if isinstance(block, MoE) else all(each is None for each in before_stream)
                return ExpertsTrialShape(
                    block.routing,
                    stream_width=block.router.shape[1],
                    width=experts.gate_up.shape[1],
                    inner_width=experts.down.shape[1],
                    activation=experts.activation,
                    dtype=self.dtype,
                    norm_dtype=None if weight is None else weight.dtype,
                    router_bias=getattr(block, "router_bias", None) is not None,
                    choice_bias=getattr(block, "choice_bias", None) is not None,
                    gate_up_bias=experts.gate_up_bias is not None,
                    down_bias=experts.down_bias is not None,
                    residual=added,
                    expert_scale=getattr(block, "expert_scale", None) is not None,
                    scaled=experts.is_scaled,
                )
        return None

    def _first(self, kind: type[Any]) -> Any:
        return next((module for module in self._modules() if isinstance(module, kind)), None)

    def _modules(self) -> Iterator[Any]:
        return self.model.modules() if isinstance(self.model, nn.Module) else iter(())

    def _children(self) -> Iterator[tuple[str, nn.Module]]:
        return self.model.named_children() if isinstance(self.model, nn.Module) else iter(())


def _reference_product(norm: RMSNorm, x: Tensor, weight: Tensor, gate: Curve | None) -> Tensor:
    """Computes the reference of `_try_scaled` in torch."""
    out = norm(x) @ weight.t()
    return out if gate is None else REFERENCE.gate_mul(out, gate)


def select_kernels(
    ops: Ops, trials: Trials, *, kernels: str, strict: bool, deterministic: bool, findings: Findings | None = None
) -> Ops:
    """Returns the ops table to build the model with. In the deterministic mode no other kernel may replace one of its
    row, however correct or fast.
    """
    device, findings = trials.device, findings or Findings()
    try:
        if not deterministic:
            ops = _select_hopper(ops, trials, strict, findings)
        if ops is not REFERENCE and ops is not DETERMINISTIC and ops.native is None:
            ops = settle_ops(ops, trials.rows(), strict=strict or deterministic, findings=findings)
        if not deterministic and device.type != "cpu" and (gate_up := trials.largest_gate_up()) is not None:
            ops = settle_gated(ops, gate_up, device, strict=strict, findings=findings)
        if not deterministic and device.type == "cuda":
            ops = select_library(ops, trials, kernels)
    finally:  # memory that torch's allocator caches counts as used wherever free memory is measured next
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return ops


def _select_hopper(ops: Ops, trials: Trials, strict: bool, findings: Findings) -> Ops:
    """Tries the Hopper-only kernels and puts those that pass into the table."""
    latent, net, by_channel, mamba = trials.latent(), trials.delta_net(), trials.channel_delta(), trials.mamba()
    device = trials.device
    ops = settle_prompts(ops, trials.attention(), device, strict=strict, findings=findings)
    if latent is not None:
        ops = settle_latent(ops, latent, device, strict=strict, findings=findings)
    if net is not None:
        ops = settle_delta_net(ops, net.shape, trials.dtype, device, strict=strict, findings=findings)
    if by_channel is not None:
        ops = settle_channel_delta(ops, by_channel.shape, trials.dtype, device, strict=strict, findings=findings)
    if mamba is not None:
        ops = settle_mamba(ops, mamba, device, strict=strict, findings=findings)
    return ops


def select_library(ops: Ops, trials: Trials, kernels: str) -> Ops:
    """Puts a library's attention kernels into the table, if one is installed and faster, or requested by name."""
    if kernels not in ("auto", *LIBRARY_NAMES):
        return ops
    shapes = trials.attention()
    if not isinstance(trials.model, DenseModel):  # MoEModel is a DenseModel, with the same attention
        trouble = "this kind of model has no use for it"
    elif any(shape.softcap is not None or shape.sinks for shape in shapes):
        trouble = "no library supports this model's soft caps or sinks"
    elif ops.plan_attention is REFERENCE.plan_attention:
        trouble = "it works beside Triton's attention, which can't be used here"
    else:
        trouble = ""
    from quire.kernels.libraries.choose import choose_library, refusal

    if trouble:
        if kernels == "auto":
            return ops
        raise refusal(kernels, trouble)
    widest = next((shape for shape in shapes if shape.window is None), shapes[0])
    return choose_library(ops, widest, trials.device, kernels)
