"""Builds transformers models on meta (buffers, weight names, cache specs) and runs their body. Used by `model`."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from quire.layers.weights import Part, Weight
from quire.models.fallback.attention import (
    ATTENTION,
    AttentionRecorder,
    LayerShape,
    PagedStep,
    paged_attention,
    unsupported,
)
from quire.models.fallback.recurrent_states import RowStates, StateRecorder
from quire.types import CacheSpec, QuireError

CACHES = ("past_key_values", "cache_params")  # parameter names of models for a cache


def import_transformers(model_type: str) -> Any:
    """Imports transformers and registers the attention function; raises an error that says how to install it if
    missing.
    """
    try:
        import transformers
    except ImportError:
        what = (
            f"Model type {model_type} has no family of its own, and transformers, which may run it, is not installed."
        )
        raise QuireError(
            "unsupported_model", what, "Install it: pip install 'quire[fallback]', or transformers 5 by itself."
        ) from None
    transformers.AttentionInterface.register(ATTENTION, paged_attention)
    return transformers


@cache
def is_causal(model_type: str) -> bool:
    """Returns whether transformers is installed and has a causal model of this type."""
    try:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    except ImportError:
        return False
    return model_type in CAUSAL


def check_ropes(model_type: str, hf: Any) -> None:
    """Refuses ropes whose frequencies depend on sequence length."""
    ropes = getattr(hf, "rope_parameters", None) or {}
    for rope in (ropes, *(part for part in ropes.values() if isinstance(part, dict))):
        if rope.get("rope_type") == "longrope":  # its frequencies would follow the longest row of a step
            raise unsupported(model_type, "its rope (longrope) depends on the sequence length")


def build_on_meta(hf: Any, dtype: torch.dtype, attention: str) -> Any:
    import transformers

    with torch.device("meta"):
        try:
            causal = transformers.AutoModelForCausalLM.from_config(
                copy.deepcopy(hf), attn_implementation=attention, dtype=dtype
            )
        except Exception as error:  # model code of transformers can raise anything
            by_name = isinstance(error, KeyError) and error.args[:1] == (ATTENTION,)
            reason = "it has attention classes of its own" if by_name else first_line(error)
            raise unsupported(hf.model_type, reason) from None
    causal.eval()
    with suppress(Exception):  # some configs refuse to have none
        # rows are never padded, and a check for padding tokens would synchronize with the device
        causal.config.pad_token_id = None
    return causal


def body_name(causal: Any) -> str:
    """Returns the name of the submodule that is everything but the head. `base_model_prefix` is wrong in some
    models.
    """
    return next((name for name in (causal.base_model_prefix, "model") if name in causal._modules), "")


def body_of(causal: Any) -> Any:
    return causal._modules.get(body_name(causal), causal)


def run_body(
    base: Any,
    tokens: Tensor,
    positions: Tensor,
    quire: AttentionRecorder | PagedStep | None,
    states: StateRecorder | RowStates | None = None,
) -> Tensor:
    """Runs tokens and positions [rows, n] through a body -> hidden states [rows, n, width]. `states`: the cache object
    of models that keep states.
    """
    taken = parameters_of(base.__class__)
    # Models use a cache that is passed whatever `use_cache` says; with it some create one of their own.
    given: dict[str, Any] = {"use_cache": False, **({} if quire is None else {"quire": quire})}
    if "position_ids" in taken:
        given["position_ids"] = positions
    if states is not None:
        given |= dict.fromkeys([name for name in CACHES if name in taken][:1], states)
        given |= states.body_arguments(base, taken)
    if not any(taken[name].kind == inspect.Parameter.VAR_KEYWORD for name in taken):
        given = {name: value for name, value in given.items() if name in taken}
    output = base(input_ids=tokens, **given)
    if states is not None:
        states.collect_states(base, output)
    return output.last_hidden_state


@cache
def parameters_of(kind: type[nn.Module]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(kind.forward).parameters


def index_specs(dims: dict[int, int], dtype: torch.dtype, page_tokens: int) -> list[CacheSpec]:
    """Returns the cache specs of index keys, by which sparse attention selects tokens: one group per dimension."""
    by_dim: dict[int, list[int]] = {}
    for layer, dim in sorted(dims.items()):
        by_dim.setdefault(dim, []).append(layer)
    name = str(dtype).removeprefix("torch.")
    return [
        CacheSpec(f"index-{n}", "paged", tuple(layers), (1, dim), name, planes=1, page_tokens=page_tokens)
        for n, (dim, layers) in enumerate(by_dim.items())
    ]


def cache_specs(shapes: dict[int, LayerShape], dtype: torch.dtype, page_tokens: int) -> list[CacheSpec]:
    """Returns the cache specs of keys and values. Layers of equal shape and window are one group."""
    groups: dict[tuple[int | None, int, int], list[int]] = {}
    for layer, shape in sorted(shapes.items()):
        groups.setdefault((shape.window, shape.num_kv_heads, max(shape.k_dim, shape.v_dim)), []).append(layer)
    return [
        CacheSpec(
            group=f"{'full' if window is None else 'window'}-{index}",
            kind="paged",
            layers=tuple(layers),
            shape=(num_kv_heads, width),
            dtype=str(dtype).removeprefix("torch."),
            page_tokens=page_tokens,
            window=window,
        )
        for index, ((window, num_kv_heads, width), layers) in enumerate(groups.items())
    ]


def rebuild_buffers(causal: Any, model_type: str, device: torch.device) -> None:
    """Initializes buffers that no checkpoint holds (frequencies, scales) with the model's own code: by their module's,
    or else by that of a module around it.
    """
    kept = set(causal.state_dict())
    modules = dict(causal.named_modules())
    for prefix, module in modules.items():
        names = [name for name, _ in module.named_buffers(recurse=False) if _join(prefix, name) not in kept]
        for name in names:
            old = module._buffers[name]
            fill = math.nan if old.is_floating_point() else -1
            module._buffers[name] = torch.full(old.shape, fill, dtype=old.dtype, device=device)
        if names:
            _initialise(modules, prefix)
    for prefix, module in modules.items():
        owners = prefix.split(".")
        while owners and _uninitialized(module):
            owners.pop()
            _initialise(modules, ".".join(owners))
        for name in _uninitialized(module):
            raise unsupported(model_type, f"its buffer {_join(prefix, name)} can't be initialized")


def _initialise(modules: Mapping[str, Any], prefix: str) -> None:
    """Initializes a module by the nearest enclosing model. Some models consist of several, with initializers of their
    own.
    """
    path = prefix.split(".") if prefix else []
    owners = (modules[".".join(path[:end])] for end in range(len(path), -1, -1))
    model = next(owner for owner in owners if hasattr(owner, "_init_weights"))
    with torch.no_grad():
        model._init_weights(modules[prefix])


def _uninitialized(module: nn.Module) -> list[str]:
    """Returns the names of buffers that are still NaN, which means that no initializer has set them."""
    tables = module.named_buffers(recurse=False)
    return [name for name, x in tables if not x.is_meta and x.is_floating_point() and bool(x.isnan().any())]


def make_weights(causal: Any, dtype: torch.dtype) -> None:
    """Turns every parameter, and every buffer that checkpoints hold, into a weight that names its checkpoint tensor.
    Tied parameters get the same name, so the loader makes them one tensor.
    """
    in_full = _float32_weights(causal, dtype)
    names: dict[int, str] = {}
    for prefix, module in list(causal.named_modules()):
        kept_buffers = [(name, value) for name, value in module._buffers.items() if value is not None and value.is_meta]
        for name, value in [*module._parameters.items(), *kept_buffers]:
            if value is None or isinstance(value, Weight):
                continue
            first = names.setdefault(id(value), _join(prefix, name))
            shape = tuple(value.shape)
            kept = value.dtype if not value.is_floating_point() else torch.float32 if in_full(first) else dtype
            rows = shape or (1,)  # a scalar is kept as a row of one
            layouts = [(Part(called, shape, 0, rows[0]),) for called in _checkpoint_names(first)]
            weight = Weight(rows, kept, layouts[0], tuple(layouts[1:]))
            module._buffers.pop(name, None)
            module._parameters[name] = weight


def _float32_weights(causal: Any, dtype: torch.dtype) -> Callable[[str], bool]:
    """Returns a predicate for the weights that the model keeps in float32 in every dtype, or in every dtype but
    bfloat16.
    """
    fields = ["_keep_in_fp32_modules_strict", *(["_keep_in_fp32_modules"] if dtype == torch.float16 else [])]
    parts = [part for field in fields for part in getattr(causal, field, None) or ()]
    wanted = [re.compile(rf"(^|\.){part}($|\.)") for part in parts]
    return lambda name: any(pattern.search(name) for pattern in wanted)


def _checkpoint_names(name: str) -> list[str]:
    """Returns the names that a checkpoint may use for a parameter: the model's, or an older one."""
    return [name, name.replace("lm_head.", "embed_out.")] if name.startswith("lm_head.") else [name]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def first_line(error: Exception) -> str:
    """Returns the first line of an error, with the second if the first ends with a colon. A KeyError has only the
    key.
    """
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return (f"it does not know {text}" if isinstance(error, KeyError) else text)[:300].rstrip(".")
