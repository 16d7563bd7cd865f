"""Building a model of other people's making on meta: its tables, its weights' names, where what its layers keep goes;
and running it. For `fallback`."""

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
    LayerShape,
    PagedStep,
    Rehearsal,
    paged_attention,
    unsupported,
)
from quire.models.fallback.recurrent_states import RowStates, StateRehearsal
from quire.types import CacheSpec, QuireError

CACHES = ("past_key_values", "cache_params")  # what models call the cache they are given


def import_transformers(model_type: str) -> Any:
    try:
        import transformers
    except ImportError:
        what = f"Model type {model_type} is not supported by itself, and transformers, which may know it, is missing."
        raise QuireError(
            "unsupported_model", what, "pip install 'quire[fallback]', or transformers 5 itself."
        ) from None
    transformers.AttentionInterface.register(ATTENTION, paged_attention)
    return transformers


@cache
def is_causal(model_type: str) -> bool:
    """Whether an installed transformers, if there is one, has a causal model of that type."""
    try:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    except ImportError:
        return False
    return model_type in CAUSAL


def check_ropes(model_type: str, hf: Any) -> None:
    ropes = getattr(hf, "rope_parameters", None) or {}
    for rope in (ropes, *(part for part in ropes.values() if isinstance(part, dict))):
        if rope.get("rope_type") == "longrope":  # its frequencies would follow the longest row of a step
            raise unsupported(model_type, "its rope (longrope) changes with the length of what it is given")


def build_on_meta(hf: Any, dtype: torch.dtype, attention: str) -> Any:
    import transformers

    with torch.device("meta"):
        try:
            causal = transformers.AutoModelForCausalLM.from_config(
                copy.deepcopy(hf), attn_implementation=attention, dtype=dtype
            )
        except Exception as error:  # anything can happen in other people's code
            by_name = isinstance(error, KeyError) and error.args[:1] == (ATTENTION,)
            reason = "it has attention classes of its own" if by_name else first_line(error)
            raise unsupported(hf.model_type, reason) from None
    causal.eval()
    with suppress(Exception):  # some insist on having one
        causal.config.pad_token_id = None  # no row is padded, and who looks for padding looks at tensors from the host
    return causal


def body_name(causal: Any) -> str:
    """Of its part that is everything but the head. Some say it wrong."""
    return next((name for name in (causal.base_model_prefix, "model") if name in causal._modules), "")


def body_of(causal: Any) -> Any:
    return causal._modules.get(body_name(causal), causal)


def run_body(
    base: Any,
    tokens: Tensor,
    positions: Tensor,
    quire: Rehearsal | PagedStep | None,
    states: StateRehearsal | RowStates | None = None,
) -> Tensor:
    """tokens and positions [rows, n] -> hidden states [rows, n, width]. `states`: for models that keep some."""
    taken = parameters_of(base.__class__)
    # Whether they use a cache they are given, none of them asks `use_cache`; some make one of their own then.
    given: dict[str, Any] = {"use_cache": False, **({} if quire is None else {"quire": quire})}
    if "position_ids" in taken:
        given["position_ids"] = positions
    if states is not None:
        given |= dict.fromkeys([name for name in CACHES if name in taken][:1], states)
        given |= states.hand_in(base, taken)
    if not any(taken[name].kind == inspect.Parameter.VAR_KEYWORD for name in taken):
        given = {name: value for name, value in given.items() if name in taken}
    output = base(input_ids=tokens, **given)
    if states is not None:
        states.take_back(base, output)
    return output.last_hidden_state


@cache
def parameters_of(kind: type[nn.Module]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(kind.forward).parameters


def index_specs(dims: dict[int, int], dtype: torch.dtype, page_tokens: int) -> list[CacheSpec]:
    by_dim: dict[int, list[int]] = {}
    for layer, dim in sorted(dims.items()):
        by_dim.setdefault(dim, []).append(layer)
    name = str(dtype).removeprefix("torch.")
    return [
        CacheSpec(f"index-{n}", "paged", tuple(layers), (1, dim), name, planes=1, page_tokens=page_tokens)
        for n, (dim, layers) in enumerate(by_dim.items())
    ]


def cache_specs(shapes: dict[int, LayerShape], dtype: torch.dtype, page_tokens: int) -> list[CacheSpec]:
    """Layers that keep the same, over the same window, are one group."""
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
    """Tables that are in no checkpoint (frequencies, scales): made anew the way the model itself initialises them, each
    by its own module or by one that this is a part of."""
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
        while owners and _unmade(module):
            owners.pop()
            _initialise(modules, ".".join(owners))
        for name in _unmade(module):
            raise unsupported(model_type, f"its table {_join(prefix, name)} can't be made anew")


def _initialise(modules: Mapping[str, Any], prefix: str) -> None:
    """By the model that the module is nearest to: some are made of several, each with its own ways."""
    path = prefix.split(".") if prefix else []
    owners = (modules[".".join(path[:end])] for end in range(len(path), -1, -1))
    model = next(owner for owner in owners if hasattr(owner, "_init_weights"))
    with torch.no_grad():
        model._init_weights(modules[prefix])


def _unmade(module: nn.Module) -> list[str]:
    tables = module.named_buffers(recurse=False)
    return [name for name, x in tables if not x.is_meta and x.is_floating_point() and bool(x.isnan().any())]


def make_weights(causal: Any, dtype: torch.dtype) -> None:
    """Every parameter, and every buffer that is in checkpoints, becomes a weight that names its checkpoint tensor. Tied
    ones name the same tensor, and the loader then makes them one."""
    in_full = _kept_in_full(causal, dtype)
    names: dict[int, str] = {}
    for prefix, module in list(causal.named_modules()):
        kept_buffers = [(name, value) for name, value in module._buffers.items() if value is not None and value.is_meta]
        for name, value in [*module._parameters.items(), *kept_buffers]:
            if value is None or isinstance(value, Weight):
                continue
            first = names.setdefault(id(value), _join(prefix, name))
            shape = tuple(value.shape)
            kept = value.dtype if not value.is_floating_point() else torch.float32 if in_full(first) else dtype
            rows = shape or (1,)  # a single number is kept as a row of one
            layouts = [(Part(called, shape, 0, rows[0]),) for called in _checkpoint_names(first)]
            weight = Weight(rows, kept, layouts[0], tuple(layouts[1:]))
            module._buffers.pop(name, None)
            module._parameters[name] = weight


def _kept_in_full(causal: Any, dtype: torch.dtype) -> Callable[[str], bool]:
    """Which of its weights a model wants in float32, whatever it computes in: some always, others unless they are
    bfloat16."""
    fields = ["_keep_in_fp32_modules_strict", *(["_keep_in_fp32_modules"] if dtype == torch.float16 else [])]
    parts = [part for field in fields for part in getattr(causal, field, None) or ()]
    wanted = [re.compile(rf"(^|\.){part}($|\.)") for part in parts]
    return lambda name: any(pattern.search(name) for pattern in wanted)


def _checkpoint_names(name: str) -> list[str]:
    """What a checkpoint may call a parameter: as the model does, or as it once did."""
    return [name, name.replace("lm_head.", "embed_out.")] if name.startswith("lm_head.") else [name]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def first_line(error: Exception) -> str:
    """With what follows it, where the first line only announces that. A key error says no more than the key."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return (f"it does not know {said}" if isinstance(error, KeyError) else said)[:300].rstrip(".")
