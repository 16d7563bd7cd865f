"""Finds what the layers of a transformers model keep, in a dry run before it has weights. Used by `model`.

A few tokens run through the model on meta. `attention` records the calls of attention, `recurrent_states` the use of
the cache. The first attempt replaces the model's attention by Quire's. If that fails, the second keeps the model's own,
over keys gathered from pages (`gathered_attention`), and the third looks for states outside any cache
(`opaque_states`).
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire.models.fallback.attention import ATTENTION, AttentionRecorder, LayerShape, unsupported
from quire.models.fallback.build import CACHES, body_of, build_on_meta, first_line, parameters_of, run_body
from quire.models.fallback.opaque_states import ALL_LAYERS, OpaqueForm, OpaqueStateRecorder, find_opaque_states
from quire.models.fallback.recurrent_states import LayerStates, StateRecorder
from quire.models.fallback.synthetic_values import SyntheticValues
from quire.types import QuireError

_PAGED_TYPES = {"full_attention", "sliding_attention"}
_STATE_TYPES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}  # the hybrid types keep keys and values, too
_STATELESS_TYPES = {"moe", "mlp"}
_OWN_MASKS = {"chunked_attention", "indexed_attention", "deepseek_sparse_attention"}  # the last two are synonyms
_NOT_RECORDED = "its attention can't be replaced, or it keeps a state in a form of its own"
_OLD_TYPE_NAMES = {"attention", "mamba"}  # transformers replaces these names by current ones
_DRY_RUN_DTYPE = torch.bfloat16  # the only dtype that some kernels of transformers models accept on meta
# Tokens per call for layers that scan or attend by themselves, which may take a megabyte a token: the usual number, the
# most where a token takes little, and the fewest where it takes much, so that the largest tensor has CALL_BYTES at
# most.
CALL_TOKENS = 256
MAX_CALL_TOKENS = 4096
MIN_CALL_TOKENS = 16
CALL_BYTES = 2**28
MAX_OPERATIONS = 40_000  # operations observed in the search for the largest tensor


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What the layers of a model keep: of each token in pages, of a sequence in state slots. A layer may do both."""

    shapes: dict[int, LayerShape]
    states: dict[int, LayerStates]
    # dimension of the index keys of layers with sparse attention
    index_dims: dict[int, int] = field(default_factory=dict)
    own: OpaqueForm | None = None  # form of states outside any cache; `states` is then one entry for all layers
    gathers: bool = False  # attention is the model's own, over keys gathered from pages

    @property
    def attention(self) -> str:
        return "eager" if self.gathers else ATTENTION


def check_layers(model_type: str, kinds: Any) -> None:
    """Refuses unknown layer types, whose state would not be found."""
    known = _PAGED_TYPES | _STATE_TYPES | _STATELESS_TYPES | _OWN_MASKS | _OLD_TYPE_NAMES
    other = next((kind for kind in kinds or () if kind not in known), None)
    if other is not None:
        raise unsupported(model_type, f"its layer type {other} is unknown, or keeps a state in a form of its own")


def find_cache_layout(hf: Any) -> CacheLayout:
    """Returns what each layer keeps, from a forward pass without weights."""
    try:
        return _try_paged_attention(hf)
    except QuireError as refused:
        layout = _try_own_attention(hf) or _try_opaque_states(hf)
        if layout is None:
            raise refused from None
        return layout


def _try_paged_attention(hf: Any) -> CacheLayout:
    """Runs the model with Quire's attention in place of its own."""
    causal = build_on_meta(hf, _DRY_RUN_DTYPE, ATTENTION)
    states = _record_states(causal, replaces_attention=True) or StateRecorder(_DRY_RUN_DTYPE)
    is_replaceable = getattr(causal, "_supports_attention_backend", False) or states.layers
    if not is_replaceable or _OWN_MASKS & {*(getattr(hf, "layer_types", None) or ())}:
        raise unsupported(hf.model_type, _NOT_RECORDED)
    try:
        cache = StateRecorder if states.layers else None
        shapes = _record_body(body_of(causal), True, cache)[0].layers
    except QuireError:
        raise
    except Exception as error:  # model code of transformers can raise anything
        raise unsupported(hf.model_type, f"a dry run of it failed: {first_line(error)}") from None
    if not set(states.with_keys) <= set(shapes):
        raise unsupported(hf.model_type, "some of its attention can't be replaced")
    _check_all_keep(causal, set(shapes), set(states.layers))
    return CacheLayout(_with_windows(shapes, causal, hf), states.layers)


def _try_own_attention(hf: Any) -> CacheLayout | None:
    """Runs the model with its own attention and a cache. Returns None if that fails, too, or if a layer keeps a state
    that is not recorded. A model that can't be built with its own attention raises the reason.
    """
    causal = build_on_meta(hf, _DRY_RUN_DTYPE, "eager")
    try:
        states = _record_states(causal, replaces_attention=False)
        if states is None or not states.with_keys:
            return None
        _check_all_keep(causal, set(states.with_keys), set(states.layers))
    except QuireError:
        return None
    return CacheLayout(states.with_keys, states.layers, states.index_dims, gathers=True)


def _try_opaque_states(hf: Any) -> CacheLayout | None:
    """Runs the model with states in a form of its own, and with Quire's attention if it attends. Returns None if no
    states are found.
    """
    causal = build_on_meta(hf, _DRY_RUN_DTYPE, ATTENTION)
    body = body_of(causal)
    probes: list[tuple[AttentionRecorder, StateRecorder]] = []

    def probe(num_rows: int, count: int) -> Any:
        probes.append(_record_body(body, True, OpaqueStateRecorder, count, num_rows))
        return probes[-1][1].output

    try:
        found = find_opaque_states(body, parameters_of(body.__class__), probe, _DRY_RUN_DTYPE)
    except Exception:  # model code of transformers can raise anything
        return None
    if found is None:
        return None
    attention, states = probes[-1]
    if states.layers or not set(states.with_keys) <= set(attention.layers):
        return None
    return CacheLayout(_with_windows(attention.layers, causal, hf), {ALL_LAYERS: found[1]}, own=found[0])


def _record_body(
    body: Any, replaces_attention: bool, cache: type[StateRecorder] | None, count: int = 2, num_rows: int = 1
) -> tuple[AttentionRecorder, StateRecorder]:
    """Runs tokens through a body on meta and returns the recorded calls of attention, if `replaces_attention`, and of
    the cache, if one is passed. A body that reads values on the host runs with synthetic values instead of meta
    tensors.
    """
    try:
        return _run_tokens(
            body, replaces_attention, cache, torch.zeros(num_rows, count, dtype=torch.long, device="meta")
        )
    except QuireError:
        raise
    # model code of transformers can raise anything; an error with synthetic values is the one that is reported
    except Exception:
        with SyntheticValues():
            return _run_tokens(body, replaces_attention, cache, torch.zeros(num_rows, count, dtype=torch.long))


@torch.no_grad()
def _run_tokens(
    body: Any, replaces_attention: bool, cache: type[StateRecorder] | None, tokens: Tensor
) -> tuple[AttentionRecorder, StateRecorder]:
    attention, states = AttentionRecorder(), (cache or StateRecorder)(_DRY_RUN_DTYPE)
    run_body(body, tokens, tokens, attention if replaces_attention else None, None if cache is None else states)
    return attention, states


def _record_states(causal: Any, replaces_attention: bool) -> StateRecorder | None:
    """Returns the recorded use of a cache. None: the model takes no cache, or fails with one. It may still run without,
    since most keep only keys and values, which the attention function records.
    """
    body = body_of(causal)
    if not any(name in parameters_of(body.__class__) for name in CACHES):
        return None
    try:
        return _record_body(body, replaces_attention, StateRecorder)[1]
    # model code of transformers can raise anything; the dry run without a cache reports its own error
    except Exception:
        return None


def _check_all_keep(causal: Any, attend: set[int], recur: set[int]) -> None:
    """Raises unless every layer keeps something or is of a type that keeps nothing, and a model that declares states
    has shown them.
    """
    hf = causal.config
    num_layers = int(hf.num_hidden_layers)
    kinds = getattr(hf, "layer_types", None) or [None] * num_layers
    idle = {layer for layer, kind in enumerate(kinds) if kind in _STATELESS_TYPES}
    if not (attend or recur) or (getattr(causal, "_is_stateful", False) and not recur):
        raise unsupported(hf.model_type, _NOT_RECORDED)
    if attend | recur | idle != set(range(num_layers)):
        what = f"{len(attend | recur)} of its {num_layers} layers attend or keep a state in a known form"
        raise unsupported(hf.model_type, f"{what}, and others may keep one in an unknown form")


def _with_windows(shapes: dict[int, LayerShape], causal: Any, hf: Any) -> dict[int, LayerShape]:
    """Completes the windows of layers. Some models apply their window through masks only, which are not created for
    Quire's attention. Models with windows in some layers declare `layer_types` and pass the window to attention.
    """
    masks = hasattr(sys.modules[type(causal).__module__], "create_sliding_window_causal_mask")
    declared = any(shape.window for shape in shapes.values()) or getattr(hf, "layer_types", None) is not None
    window = getattr(hf, "sliding_window", None) if masks and not declared else None
    return shapes if window is None else {layer: replace(shape, window=window) for layer, shape in shapes.items()}


class _LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that an operation allocates; views of existing memory, such as weights, do
    not count. Raises after MAX_OPERATIONS: layers are much alike, and a scan token by token would delay a start by
    half a minute.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes, self._operations = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._operations += 1
        if self._operations > MAX_OPERATIONS:
            raise RuntimeError("maximum number of operations reached")
        made = func(*args, **(kwargs or {}))
        given = {_storage_id(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, Tensor) and _storage_id(tensor) not in given:
                self.num_bytes = max(self.num_bytes, tensor.numel() * tensor.element_size())
        return made


def _storage_id(x: Tensor) -> int:
    """Returns the identity of a tensor's storage."""
    return int(x.untyped_storage()._cdata)


def measure_call(hf: Any, layout: CacheLayout, dtype: torch.dtype, max_len: int) -> tuple[int, int]:
    """Returns the maximum tokens of one call and the bytes of the largest tensor it allocates, measured on meta.

    Recurrent scans in transformers may allocate a thousand times their output. With the model's own attention the
    largest tensor is the scores over all previous tokens.
    """
    body = body_of(build_on_meta(hf, _DRY_RUN_DTYPE, layout.attention))
    largest = _LargestTensor()
    with suppress(Exception), largest:  # model code of transformers can raise anything; the size found so far counts
        _record_body(
            body, not layout.gathers, StateRecorder if layout.own is None else OpaqueStateRecorder, CALL_TOKENS
        )
    num_bytes = max(largest.num_bytes * dtype.itemsize // _DRY_RUN_DTYPE.itemsize, 1)
    if layout.gathers:
        scores = 4 * _max_heads(hf) * max_len  # per token
        call_tokens = min(CALL_TOKENS, max(4 * CALL_BYTES // scores, MIN_CALL_TOKENS))
        return call_tokens, max(num_bytes, call_tokens * scores)
    times = 1
    while 2 * times * num_bytes <= CALL_BYTES and 2 * times * CALL_TOKENS <= MAX_CALL_TOKENS:
        times *= 2
    return times * CALL_TOKENS, times * num_bytes


def _max_heads(hf: Any) -> int:
    """Returns the number of attention heads of the layer with the most."""
    try:
        return int(getattr(hf, "num_attention_heads", 1))
    except RuntimeError:  # configs with per-layer values raise instead of returning one
        return max(int(layer.num_attention_heads) for layer in hf.per_layer_config)
