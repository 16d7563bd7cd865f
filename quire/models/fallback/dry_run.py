"""What the layers of a model of other people's making keep, seen before it has weights. For `fallback`.

A pass over a few tokens, with weights that are no more than shapes, tells it: what attention is called with
(`fallback_attention`) and what a cache is used for (`fallback_states`). It is tried with the model's attention swapped
for ours; if that can't be, with its own over keys that are gathered (`fallback_gathered`); and then with what it keeps
in a form of its own (`fallback_own`).
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

from quire.models.fallback.attention import ATTENTION, LayerShape, Rehearsal, unsupported
from quire.models.fallback.build import CACHES, body_of, build_on_meta, first_line, parameters_of, run_body
from quire.models.fallback.opaque_states import LAYER as OWN_LAYER
from quire.models.fallback.opaque_states import OwnForm, OwnRehearsal, find_own
from quire.models.fallback.recurrent_states import LayerStates, StateRehearsal
from quire.models.fallback.synthetic_values import MadeUp
from quire.types import QuireError

_KEEP_KEYS = {"full_attention", "sliding_attention"}
_KEEP_STATE = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}  # the last two: and keys
_KEEP_NOTHING = {"moe", "mlp"}
_OWN_MASKS = {"chunked_attention", "indexed_attention", "deepseek_sparse_attention"}  # the last two: names of one thing
_OWN_WAYS = "its attention can't be exchanged, or it keeps a state of its own"
_OLD_NAMES = {"attention", "mamba"}  # which transformers replaces
_REHEARSED = torch.bfloat16  # some kernels of other people's code know no other type on meta
CALL_TOKENS = 256  # of one call, where layers scan or attend by themselves: that may take a megabyte for each,
MOST_CALL_TOKENS = 4096  # where it takes little,
FEWEST_CALL_TOKENS = 16  # where it takes much,
CALL_BYTES = 2**28  # for the largest tensor
MOST_OPERATIONS = 40_000  # that are looked at to find it


@dataclass(frozen=True, slots=True)
class Kept:
    """What the layers of a model keep: of each token in pages, of a sequence in slots. A layer may do both."""

    shapes: dict[int, LayerShape]
    states: dict[int, LayerStates]
    index_dims: dict[int, int] = field(default_factory=dict)  # layers that keep a key to choose among others, too
    own: OwnForm | None = None  # states are those of all layers at once, in a form of the model's own
    gathers: bool = False  # attention is the model's own, over keys gathered from pages

    @property
    def attention(self) -> str:
        return "eager" if self.gathers else ATTENTION


def check_layers(model_type: str, kinds: Any) -> None:
    known = _KEEP_KEYS | _KEEP_STATE | _KEEP_NOTHING | _OWN_MASKS | _OLD_NAMES
    other = next((kind for kind in kinds or () if kind not in known), None)
    if other is not None:
        raise unsupported(model_type, f"layers of type {other} keep something of their own, or are not known")


def rehearse(hf: Any) -> Kept:
    """What each layer keeps, seen in a forward pass without weights."""
    try:
        return _rehearse_exchanged(hf)
    except QuireError as refused:
        kept = _rehearse_gathered(hf) or _rehearse_own(hf)
        if kept is None:
            raise refused from None
        return kept


def _rehearse_exchanged(hf: Any) -> Kept:
    """With our attention in place of the model's own."""
    causal = build_on_meta(hf, _REHEARSED, ATTENTION)
    states = _rehearse_states(causal, exchanged=True) or StateRehearsal(_REHEARSED)
    exchanges = getattr(causal, "_supports_attention_backend", False) or states.layers
    if not exchanges or _OWN_MASKS & {*(getattr(hf, "layer_types", None) or ())}:
        raise unsupported(hf.model_type, _OWN_WAYS)
    try:
        cache = StateRehearsal if states.layers else None
        shapes = _rehearse_body(body_of(causal), True, cache)[0].layers
    except QuireError:
        raise
    except Exception as error:  # anything can happen in other people's code
        raise unsupported(hf.model_type, f"a rehearsal of it failed: {first_line(error)}") from None
    if not set(states.with_keys) <= set(shapes):
        raise unsupported(hf.model_type, "some of its attention can't be exchanged")
    _check_all_keep(causal, set(shapes), set(states.layers))
    return Kept(_with_windows(shapes, causal, hf), states.layers)


def _rehearse_gathered(hf: Any) -> Kept | None:
    """With the model's own attention. None: it fails so, too, or keeps what is not seen. If it can't be built, that is
    what there is to say of it."""
    causal = build_on_meta(hf, _REHEARSED, "eager")
    try:
        states = _rehearse_states(causal, exchanged=False)
        if states is None or not states.with_keys:
            return None
        _check_all_keep(causal, set(states.with_keys), set(states.layers))
    except QuireError:
        return None
    return Kept(states.with_keys, states.layers, states.index_dims, gathers=True)


def _rehearse_own(hf: Any) -> Kept | None:
    """With states in a form of the model's own, and our attention if it has any. None: nothing is seen so, either."""
    causal = build_on_meta(hf, _REHEARSED, ATTENTION)
    body = body_of(causal)
    probes: list[tuple[Rehearsal, StateRehearsal]] = []

    def probe(num_rows: int, count: int) -> Any:
        probes.append(_rehearse_body(body, True, OwnRehearsal, count, num_rows))
        return probes[-1][1].output

    try:
        found = find_own(body, parameters_of(body.__class__), probe, _REHEARSED)
    except Exception:  # anything can happen in other people's code
        return None
    if found is None:
        return None
    attention, states = probes[-1]
    if states.layers or not set(states.with_keys) <= set(attention.layers):
        return None
    return Kept(_with_windows(attention.layers, causal, hf), {OWN_LAYER: found[1]}, own=found[0])


def _rehearse_body(
    body: Any, exchanged: bool, cache: type[StateRehearsal] | None, count: int = 2, num_rows: int = 1
) -> tuple[Rehearsal, StateRehearsal]:
    """What tokens call on their way through a body whose weights are on meta: our attention, if its own is exchanged
    for it, and a cache, if it is given one. On meta as well; or with numbers, if it looks at them."""
    try:
        return _pass_tokens(body, exchanged, cache, torch.zeros(num_rows, count, dtype=torch.long, device="meta"))
    except QuireError:
        raise
    except Exception:  # anything can happen in other people's code; it is said what happens with numbers
        with MadeUp():
            return _pass_tokens(body, exchanged, cache, torch.zeros(num_rows, count, dtype=torch.long))


@torch.no_grad()
def _pass_tokens(
    body: Any, exchanged: bool, cache: type[StateRehearsal] | None, tokens: Tensor
) -> tuple[Rehearsal, StateRehearsal]:
    attention, states = Rehearsal(), (cache or StateRehearsal)(_REHEARSED)
    run_body(body, tokens, tokens, attention if exchanged else None, None if cache is None else states)
    return attention, states


def _rehearse_states(causal: Any, exchanged: bool) -> StateRehearsal | None:
    """With a cache at hand: what it is used for. None: the model takes none, or fails with one. It may still run
    without: most keep keys and values alone, which our attention sees."""
    body = body_of(causal)
    if not any(name in parameters_of(body.__class__) for name in CACHES):
        return None
    try:
        return _rehearse_body(body, exchanged, StateRehearsal)[1]
    except Exception:  # anything can happen in other people's code; who rehearses without a cache will say what
        return None


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


def _with_windows(shapes: dict[int, LayerShape], causal: Any, hf: Any) -> dict[int, LayerShape]:
    """Some models tell their mask of a window and not their attention, and give neither to one that makes no use of
    masks. Those that have it in some layers only say which (`layer_types`), and tell the attention of each."""
    masks = hasattr(sys.modules[type(causal).__module__], "create_sliding_window_causal_mask")
    told = any(shape.window for shape in shapes.values()) or getattr(hf, "layer_types", None) is not None
    window = getattr(hf, "sliding_window", None) if masks and not told else None
    return shapes if window is None else {layer: replace(shape, window=window) for layer, shape in shapes.items()}


class _LargestTensor(TorchDispatchMode):
    """While it is entered, notes how many bytes the largest tensor has that an operation makes; one that shows
    another's memory, such as a weight's, is not made. Fails after very many operations: layers are much alike, and a
    scan token by token would hold up a start for half a minute."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes, self._operations = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._operations += 1
        if self._operations > MOST_OPERATIONS:
            raise RuntimeError("enough is seen")
        made = func(*args, **(kwargs or {}))
        given = {_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, Tensor) and _memory(tensor) not in given:
                self.num_bytes = max(self.num_bytes, tensor.numel() * tensor.element_size())
        return made


def _memory(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def measure_call(hf: Any, kept: Kept, dtype: torch.dtype, max_len: int) -> tuple[int, int]:
    """How many tokens a call may have, and bytes of the largest tensor that it makes then, seen on meta: scans of other
    people's making may take a thousand times what they return. Of attention by itself that is scores of all tokens
    before."""
    body = body_of(build_on_meta(hf, _REHEARSED, kept.attention))
    largest = _LargestTensor()
    with suppress(Exception), largest:  # anything can happen in other people's code; what was seen so far counts
        _rehearse_body(body, not kept.gathers, StateRehearsal if kept.own is None else OwnRehearsal, CALL_TOKENS)
    num_bytes = max(largest.num_bytes * dtype.itemsize // _REHEARSED.itemsize, 1)
    if kept.gathers:
        scores = 4 * _most_heads(hf) * max_len  # of one token
        call_tokens = min(CALL_TOKENS, max(4 * CALL_BYTES // scores, FEWEST_CALL_TOKENS))
        return call_tokens, max(num_bytes, call_tokens * scores)
    times = 1
    while 2 * times * num_bytes <= CALL_BYTES and 2 * times * CALL_TOKENS <= MOST_CALL_TOKENS:
        times *= 2
    return times * CALL_TOKENS, times * num_bytes


def _most_heads(hf: Any) -> int:
    try:
        return int(getattr(hf, "num_attention_heads", 1))
    except RuntimeError:  # layers have their own, and a config says so rather than name one
        return max(int(layer.num_attention_heads) for layer in hf.per_layer_config)
