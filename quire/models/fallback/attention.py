"""The attention of transformers models: the function that transformers calls in place of its own, under the name
`ATTENTION`.

Every layer of such a model calls it with queries, keys and values. In a dry run an `AttentionRecorder` records the
calls. In a step `PagedStep` writes keys and values to pages and attends over them. `model` passes one of them through
the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from quire.kernels.reference import small_ops as reference
from quire.kernels.table import Ops
from quire.layers.attention import AttentionPlan
from quire.models.registry import supported_types
from quire.types import QuireError

ATTENTION = "quire"  # key in transformers' registry of attention functions


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of a layer's keys and values, and how the layer attends."""

    num_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None
    softcap: float | None
    sinks: bool = False


@dataclass(slots=True)
class AttentionRecorder:
    """Records what each layer's attention is called with in a dry run."""

    layers: dict[int, LayerShape] = field(default_factory=dict)

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        softcap: float | None,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        num_heads, num_kv_heads = q.shape[1], k.shape[1]
        if num_heads % num_kv_heads:
            what = f"{num_heads} heads with {num_kv_heads} key-value heads are not a valid attention shape."
            raise QuireError("bad_config", what, "Check config.json.")
        layer = _layer_index(module)
        if layer in self.layers:  # pages would hold the keys of the last call only
            raise unsupported(_type_of(module), "one of its layers attends more than once")
        self.layers[layer] = LayerShape(
            num_heads, num_kv_heads, k.shape[-1], v.shape[-1], window, softcap, sinks is not None
        )
        return q.new_empty(q.shape[0], q.shape[2], num_heads, v.shape[-1])


@dataclass(slots=True)
class PagedStep:
    """The caches and plans of one step, for the attention of every layer."""

    plans: dict[int, tuple[AttentionPlan, int]]  # layer -> the plan of its cache group, the layer's index in the group
    ops: Ops

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        softcap: float | None,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attends over pages: q [rows, heads, n, head_dim], k and v alike -> [rows, n, heads, v_dim]."""
        plan, place = self.plans[_layer_index(module)]
        k_cache, v_cache = plan.planes[2 * place], plan.planes[2 * place + 1]
        num_rows, num_heads, count, _ = q.shape
        width, v_dim = k_cache.shape[-1], v.shape[-1]
        q, k, v = (widen(x.transpose(1, 2).flatten(0, 1), width) for x in (q, k, v))  # [tokens, heads, width]
        slots = plan.slots.clamp(min=0)  # padding tokens have slot -1, and page 0 is scratch
        reference.write_kv(k.to(k_cache.dtype), v.to(v_cache.dtype), k_cache, v_cache, slots)
        out = self.ops.paged_attention(q.contiguous(), k_cache, v_cache, plan.kernel, scale, softcap, sinks)
        return out.view(num_rows, count, num_heads, width)[..., :v_dim].contiguous()  # some models take views of it


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    quire: AttentionRecorder | PagedStep | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention function that transformers calls as `ATTENTION`. `quire` is the object that `run_body` passes through
    the model.
    """
    if quire is None:
        raise unsupported(_type_of(module), "it does not pass keyword arguments on to its attention")
    if any(x is not None for x in (attention_mask, others.get("position_bias"))):
        raise unsupported(_type_of(module), "its attention has a mask or biases of its own")
    if s_aux is not None and s_aux.shape != query.shape[1:2]:
        raise unsupported(_type_of(module), "its attention has sinks, but not one per head")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return quire.attend(module, query, key, value, scale, softcap, sliding_window, s_aux), None


def _layer_index(module: nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if index is None:
        raise unsupported(_type_of(module), "its attention has no layer index")
    return int(index)


def _type_of(module: nn.Module) -> str:
    return getattr(getattr(module, "config", None), "model_type", None) or type(module).__name__


def widen(x: Tensor, width: int) -> Tensor:
    """Zero-pads the last dimension of `x` to `width`."""
    return x if x.shape[-1] == width else functional.pad(x, (0, width - x.shape[-1]))


def unsupported(model_type: str, why: str) -> QuireError:
    return QuireError(
        "unsupported_model", f"{model_type} can't run through transformers here: {why}.", supported_types(model_type)
    )
