"""Building a model of other people's making on meta: what its layers keep, its tables, its weights' names. For
`fallback`."""

from __future__ import annotations

import copy
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from quire.layers.weights import Part, Weight
from quire.models.fallback_attention import ATTENTION, LayerShape, PagedStep, Rehearsal, paged_attention, unsupported
from quire.models.fallback_madeup import MadeUp
from quire.models.fallback_states import LayerStates, RowStates, StateRehearsal
from quire.types import CacheSpec, QuireError

_KEEP_KEYS = {"full_attention", "sliding_attention"}
_KEEP_STATE = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}  # the last two: and keys
_KEEP_NOTHING = {"moe", "mlp"}
_OWN_MASKS = {"chunked_attention", "indexed_attention", "deepseek_sparse_attention"}  # the last two: names of one thing
_OWN_WAYS = "its attention can't be exchanged, or it keeps a state of its own"
_OLD_NAMES = {"attention", "mamba"}  # which transformers replaces
_CACHES = ("past_key_values", "cache_params")  # what models call the cache they are given
_REHEARSED = torch.bfloat16  # some kernels of other people's code know no other type on meta
CALL_TOKENS = 256  # of one call, where layers scan or attend by themselves: that may take a megabyte for each,
MOST_CALL_TOKENS = 4096  # where it takes little,
FEWEST_CALL_TOKENS = 16  # where it takes much,
CALL_BYTES = 2**28  # for the largest tensor


@dataclass(frozen=True, slots=True)
class Kept:
    """What the layers of a model keep: of each token in pages, of a sequence in slots. A layer may do both."""

    shapes: dict[int, LayerShape]
    states: dict[int, LayerStates]
    index_dims: dict[int, int] = field(default_factory=dict)  # layers that keep a key to choose among others, too
    gathers: bool = False  # attention is the model's own, over keys gathered from pages

    @property
    def attention(self) -> str:
        return "eager" if self.gathers else ATTENTION


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


def check_layers(model_type: str, kinds: Any) -> None:
    known = _KEEP_KEYS | _KEEP_STATE | _KEEP_NOTHING | _OWN_MASKS | _OLD_NAMES
    other = next((kind for kind in kinds or () if kind not in known), None)
    if other is not None:
        raise unsupported(model_type, f"layers of type {other} keep something of their own, or are not known")


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


def run_body(base: Any, tokens: Tensor, positions: Tensor, quire: Rehearsal | PagedStep | None,
             states: StateRehearsal | RowStates | None = None) -> Tensor:  # fmt: skip
    """tokens and positions [rows, n] -> hidden states [rows, n, width]. `states`: for models that keep some."""
    taken = _parameters(base.__class__)
    # Whether they use a cache they are given, none of them asks `use_cache`; some make one of their own then.
    given: dict[str, Any] = {"use_cache": False, **({} if quire is None else {"quire": quire})}
    if "position_ids" in taken:
        given["position_ids"] = positions
    if states is not None:
        given[next(name for name in _CACHES if name in taken)] = states
    if not any(taken[name].kind == inspect.Parameter.VAR_KEYWORD for name in taken):
        given = {name: value for name, value in given.items() if name in taken}
    return base(input_ids=tokens, **given).last_hidden_state


@cache
def _parameters(kind: type[nn.Module]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(kind.forward).parameters


def rehearse(hf: Any) -> Kept:
    """What each layer keeps, seen in a forward pass without weights."""
    try:
        return _rehearse_exchanged(hf)
    except QuireError as refused:
        kept = _rehearse_gathered(hf)
        if kept is None:
            raise refused from None
        return kept


def _rehearse_exchanged(hf: Any) -> Kept:
    """With our attention in place of the model's own."""
    causal = build_on_meta(hf, _REHEARSED, ATTENTION)
    states = _rehearse_states(causal, Rehearsal()) or StateRehearsal(_REHEARSED)
    exchanges = getattr(causal, "_supports_attention_backend", False) or states.layers
    if not exchanges or _OWN_MASKS & {*(getattr(hf, "layer_types", None) or ())}:
        raise unsupported(hf.model_type, _OWN_WAYS)
    rehearsal = Rehearsal()
    try:
        _rehearse_body(body_of(causal), rehearsal, StateRehearsal(_REHEARSED) if states.layers else None)
    except QuireError:
        raise
    except Exception as error:  # anything can happen in other people's code
        raise unsupported(hf.model_type, f"a rehearsal of it failed: {first_line(error)}") from None
    shapes = rehearsal.layers
    if not set(states.with_keys) <= set(shapes):
        raise unsupported(hf.model_type, "some of its attention can't be exchanged")
    _check_all_keep(causal, set(shapes), set(states.layers))
    window = None if any(shape.window for shape in shapes.values()) else _window_of_mask(causal, hf)
    if window is not None:
        shapes = {layer: replace(shape, window=window) for layer, shape in shapes.items()}
    return Kept(shapes, states.layers)


def _rehearse_gathered(hf: Any) -> Kept | None:
    """With the model's own attention. None: it fails so, too, or keeps what is not seen. If it can't be built, that is
    what there is to say of it."""
    causal = build_on_meta(hf, _REHEARSED, "eager")
    try:
        states = _rehearse_states(causal, None)
        if states is None or not states.with_keys:
            return None
        _check_all_keep(causal, set(states.with_keys), set(states.layers))
    except QuireError:
        return None
    return Kept(states.with_keys, states.layers, states.index_dims, gathers=True)


def _rehearse_body(body: Any, attention: Rehearsal | None, states: StateRehearsal | None, count: int = 2) -> None:
    """So many tokens through a body whose weights are on meta."""
    tokens = torch.zeros(1, count, dtype=torch.long)
    with torch.no_grad(), MadeUp():
        run_body(body, tokens, tokens, attention, states)


def _rehearse_states(causal: Any, attention: Rehearsal | None) -> StateRehearsal | None:
    """With a cache at hand: what it is used for. None: the model takes none, or fails with one. It may still run
    without: most keep keys and values alone, which our attention sees."""
    states = StateRehearsal(_REHEARSED)
    body = body_of(causal)
    if not any(name in _parameters(body.__class__) for name in _CACHES):
        return None
    try:
        _rehearse_body(body, attention, states)
    except Exception:  # anything can happen in other people's code; who rehearses without a cache will say what
        return None
    return states


def _check_all_keep(causal: Any, attend: set[int], recur: set[int]) -> None:
    """Every layer keeps something, or says that it does not; and who says that there is a state has shown it."""
    hf = causal.config
    num_layers = int(hf.num_hidden_layers)
    kinds = getattr(hf, "layer_types", None) or [None] * num_layers
    idle = {layer for layer, kind in enumerate(kinds) if kind in _KEEP_NOTHING}
    if not (attend or recur) or (getattr(causal, "_is_stateful", False) and not recur):
        raise unsupported(hf.model_type, _OWN_WAYS)
    if attend | recur | idle != set(range(num_layers)):
        what = f"{len(attend | recur)} of its {num_layers} layers attend or keep a state that is known here"
        raise unsupported(hf.model_type, f"{what}, and others may keep one that is not")


def _window_of_mask(causal: Any, hf: Any) -> int | None:
    """Some models tell their mask of a window and not their attention, and give neither to one that makes no use of
    masks. Those that have it in some layers only say which (`layer_types`), and tell the attention of each."""
    masks = hasattr(sys.modules[type(causal).__module__], "create_sliding_window_causal_mask")
    window = getattr(hf, "sliding_window", None)
    return window if masks and getattr(hf, "layer_types", None) is None else None


class _LargestTensor(TorchDispatchMode):
    """While it is entered, notes how many bytes the largest tensor has that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, Tensor):
                self.num_bytes = max(self.num_bytes, tensor.numel() * tensor.element_size())
        return made


def measure_call(hf: Any, kept: Kept, dtype: torch.dtype, max_len: int) -> tuple[int, int]:
    """How many tokens a call may have, and bytes of the largest tensor that it makes then, seen on meta: scans of other
    people's making may take a thousand times what they return. Of attention by itself that is scores of all tokens
    before."""
    body = body_of(build_on_meta(hf, _REHEARSED, kept.attention))
    tokens = torch.zeros(1, CALL_TOKENS, dtype=torch.long, device="meta")
    largest = _LargestTensor()

    def attend() -> Rehearsal | None:
        return None if kept.gathers else Rehearsal()

    try:
        with largest:
            run_body(body, tokens, tokens, attend(), StateRehearsal(_REHEARSED))
    except Exception:  # anything can happen in other people's code; if it looks at numbers, some are made up
        with suppress(Exception), largest:  # what was seen so far counts
            _rehearse_body(body, attend(), StateRehearsal(_REHEARSED), CALL_TOKENS)
    num_bytes = max(largest.num_bytes * dtype.itemsize // _REHEARSED.itemsize, 1)
    if kept.gathers:
        scores = 4 * int(getattr(hf, "num_attention_heads", 1)) * max_len  # of one token
        call_tokens = min(CALL_TOKENS, max(4 * CALL_BYTES // scores, FEWEST_CALL_TOKENS))
        return call_tokens, max(num_bytes, call_tokens * scores)
    times = 1
    while 2 * times * num_bytes <= CALL_BYTES and 2 * times * CALL_TOKENS <= MOST_CALL_TOKENS:
        times *= 2
    return times * CALL_TOKENS, times * num_bytes


def index_specs(dims: dict[int, int], dtype: torch.dtype, page_tokens: int) -> list[CacheSpec]:
    by_dim: dict[int, list[int]] = {}
    for layer, dim in sorted(dims.items()):
        by_dim.setdefault(dim, []).append(layer)
    name = str(dtype).removeprefix("torch.")
    return [CacheSpec(f"index-{n}", "paged", tuple(layers), (1, dim), name, planes=1, page_tokens=page_tokens)
            for n, (dim, layers) in enumerate(by_dim.items())]  # fmt: skip


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
