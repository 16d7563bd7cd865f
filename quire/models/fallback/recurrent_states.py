"""Recurrent layers of transformers models, whose states are kept in state slots.

Such a layer reads the last inputs of its convolution and its recurrent matrix from a transformers cache, and writes new
ones there. `StateRecorder` is this cache in a dry run and records what is kept. `RowStates` is the cache of some rows
of a step: it is filled from their slots and written back, layer by layer. Keys and values pass through both unchanged,
since `attention` keeps them in pages.

A slot of zeros equals no state: a convolution is padded with zeros, and a matrix begins with them. Where that does not
hold, or a layer can't continue from its state, `FallbackModel.verify` finds other logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.layers.recurrent.state import state_spec
from quire.layers.step import PagedInputs, StateInputs, Step
from quire.models.fallback.attention import LayerShape
from quire.types import CacheSpec

MANY = 2**31  # larger than any count here
Kind = Literal["conv", "recurrent"]
Key = tuple[Kind, int]  # a layer may keep several of each kind


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor that a layer keeps of a sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None: the model's own dtype

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


LayerStates = dict[Key, StateTensor]


class _CacheInterface:
    """Methods of a transformers cache that both caches share."""

    is_compileable = False
    is_initialized = True  # read where a mask would otherwise be created for the beginning of a prompt
    is_sliding = (False,)  # pages hold all tokens of a layer with the model's own attention

    def body_arguments(self, body: nn.Module, taken: Mapping[str, Any]) -> dict[str, Any]:
        """Returns further arguments for the body, out of the parameters it takes: see `opaque_states`."""
        return {}

    def collect_states(self, body: nn.Module, output: Any) -> None:
        """Receives the output of the body."""

    def update(self, keys: Tensor, values: Tensor, *others: Any, **more: Any) -> tuple[Tensor, Tensor]:
        return keys, values

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns 0. Models use it for positions and masks only, which are passed or not needed."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return int(query_length), 0


class StateRecorder(_CacheInterface):
    """Records what each layer keeps, in a dry run whose computation has this dtype."""

    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype
        self.layers: dict[int, LayerStates] = {}
        self.with_keys: dict[int, LayerShape] = {}  # layers that keep keys and values
        self.output: Any = None  # of the model
        self.index_dims: dict[int, int] = {}  # layers that keep index keys, which select tokens for sparse attention

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *others: Any, **more: Any) -> tuple[Tensor, Tensor]:
        heads = keys.shape[1]
        self.with_keys[layer_idx] = LayerShape(heads, heads, keys.shape[-1], values.shape[-1], None, None)
        return keys, values

    def collect_states(self, body: nn.Module, output: Any) -> None:
        self.output = output

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    get_recurrent_state = get_conv_state

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **others: Any,
    ) -> Tensor:
        kept = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        self._note(layer_idx, ("conv", state_idx), (*conv_states.shape[1:-1], kept), conv_states.dtype)
        return functional.pad(conv_states, (max(kept - conv_states.shape[-1], 0), 0))

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **others: Any
    ) -> Tensor:
        self._note(layer_idx, ("recurrent", state_idx), tuple(recurrent_states.shape[1:]), recurrent_states.dtype)
        return recurrent_states

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        self.index_dims[layer_idx] = keys.shape[-1]
        return keys

    def get_linear_cache(self, layer_idx: int) -> None:
        return None

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        self.update_recurrent_state(state, layer_idx)

    def _note(self, layer: int, key: Key, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        kept = StateTensor(shape, None if dtype == self._dtype else dtype)
        self.layers.setdefault(layer, {})[key] = kept


class RowStates(_CacheInterface):
    """The states of some rows of a step. A layer reads and replaces them; when the next layer follows, they are written
    to the rows' slots, so that one layer's states are held at a time.
    """

    def __init__(self, slots: StateSlots, step: Step, caches: Mapping[str, Tensor]):
        self._slots, self._step, self._caches = slots, step, caches
        self._layer: int | None = None
        self._states: dict[Key, Tensor] = {}  # of that layer, each [rows, ...]

    def states_of(self, layer: int) -> dict[Key, Tensor]:
        if layer != self._layer:
            self.flush()
            self._layer, self._states = layer, self._slots.read(layer, self._step, self._caches)
        return self._states

    def flush(self) -> None:
        """Writes the states of the current layer to the slots."""
        if self._layer is not None:
            self._slots.write(self._layer, self._states, self._step, self._caches)
        self._layer, self._states = None, {}

    @property
    def layers(self) -> _Layers:
        return _Layers(self)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states_of(layer_idx).get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states_of(layer_idx).get(("recurrent", state_idx))

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **others: Any) -> Tensor:
        """Appends new inputs to the kept ones and returns both, which is what the convolution sees. Keeps the last of
        them.
        """
        states = self.states_of(layer_idx)
        old = states["conv", state_idx]
        seen = torch.cat([old, conv_states.to(old.dtype)], -1)
        states["conv", state_idx] = seen[..., -old.shape[-1] :]
        return seen

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **others: Any
    ) -> Tensor:
        self.states_of(layer_idx)["recurrent", state_idx] = recurrent_states
        return recurrent_states

    get_linear_cache = get_recurrent_state

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        self.update_recurrent_state(state, layer_idx)


@dataclass(frozen=True, slots=True)
class _Layers:
    """The same states by layer, for transformers releases whose layers look for them there."""

    rows: RowStates

    def __getitem__(self, layer: int) -> _LayerOfRows:
        return _LayerOfRows(self.rows, layer)


@dataclass(frozen=True, slots=True)
class _LayerOfRows:
    """One layer's states in `_Layers`, as the layer caches of transformers present them."""

    rows: RowStates
    layer: int

    @property
    def record_past(self) -> bool:
        return False

    @property
    def conv_states(self) -> dict[int, Tensor]:
        return {index: state for (kind, index), state in self.rows.states_of(self.layer).items() if kind == "conv"}

    @property
    def recurrent_states(self) -> dict[int, Tensor]:
        states = self.rows.states_of(self.layer)
        return {index: state for (kind, index), state in states.items() if kind == "recurrent"}


# ---------------------------------------------------------------------------------------------------------------------
# Slots


def place_layers(specs: list[CacheSpec]) -> dict[int, tuple[CacheSpec, int]]:
    """Returns layer -> its cache group, its index there."""
    return {layer: (spec, place) for spec in specs for place, layer in enumerate(spec.layers)}


@dataclass(frozen=True, slots=True)
class StateSlots:
    """The slots of the layers' states. Layers with states of equal size are one group."""

    layers: Mapping[int, LayerStates]
    dtype: torch.dtype  # of the model
    specs: list[CacheSpec]
    places: Mapping[int, tuple[CacheSpec, int]]  # layer -> its cache group, its index there

    @classmethod
    def of(cls, layers: Mapping[int, LayerStates], dtype: torch.dtype, page_tokens: int) -> StateSlots:
        sizes: dict[int, list[int]] = {}
        for layer, states in sorted(layers.items()):
            sizes.setdefault(sum(state.elements for state in states.values()), []).append(layer)
        specs = [
            state_spec(f"state-{index}", tuple(of_size), size, page_tokens)
            for index, (size, of_size) in enumerate(sizes.items())
        ]
        return cls(layers, dtype, specs, place_layers(specs))

    @property
    def layer_bytes(self) -> int:
        """Bytes of the largest layer's states for one row."""
        return 4 * max((spec.shape[0] for spec in self.specs), default=0)

    def read(self, layer: int, step: Step, caches: Mapping[str, Tensor]) -> dict[Key, Tensor]:
        spec, place = self.places[layer]
        of_layer = self.layers[layer]
        flat = caches[spec.group][place].index_select(0, _slots(step, spec))  # [rows, elements]
        parts = flat.split([state.elements for state in of_layer.values()], 1)
        return {
            key: part.reshape(-1, *state.shape).to(state.dtype or self.dtype)
            for (key, state), part in zip(of_layer.items(), parts, strict=True)
        }

    def write(self, layer: int, states: Mapping[Key, Tensor], step: Step, caches: Mapping[str, Tensor]) -> None:
        spec, place = self.places[layer]
        cache = caches[spec.group][place]
        kept = torch.cat([states[key].flatten(1).to(cache.dtype) for key in self.layers[layer]], 1)
        cache.index_copy_(0, _slots(step, spec), kept)

    def fill(self, layer: int, cache: Tensor, generator: torch.Generator) -> None:
        """Fills a layer's floating-point states, in its cache [slots, elements], with random numbers. Indices stay."""
        first = 0
        for state in self.layers[layer].values():
            if (state.dtype or self.dtype).is_floating_point:
                drawn = torch.randn(len(cache), state.elements, generator=generator)
                cache[:, first : first + state.elements] = drawn.to(cache.device)
            first += state.elements


def _slots(step: Step, spec: CacheSpec) -> Tensor:
    inputs = step.groups[spec.group]
    assert isinstance(inputs, StateInputs)
    return inputs.slots


# ---------------------------------------------------------------------------------------------------------------------
# Batches of rows with equally many tokens


def split_rows(
    step: Step,
    continues_states: bool,
    separate_rows: bool,
    most: int,
    separate_beginnings: bool = False,
    most_rows: int = MANY,
) -> Iterator[tuple[Step, Tensor | None]]:
    """Yields steps of rows with equally many tokens, and the indices of their tokens in the whole step; None: all of
    them.

    Recurrent layers of transformers have batches and no ragged rows, so all decodes are one batch, and most prompts are
    batches of one. Without `continues_states`, only beginnings run as a chunk, and other tokens run one by one.
    `separate_rows`: each row is a step of its own. `separate_beginnings`: rows that begin are not with others. A step
    has at most `most_rows` rows and `most` tokens, except that all decodes stay together, so that the step can be
    captured.
    """
    by_count: dict[tuple[int, bool, bool], list[int]] = {}
    for row, (count, bound) in enumerate(zip(step.counts, step.len_bounds, strict=True)):
        key = (count, continues_states or count in (1, bound), separate_beginnings and count == bound)
        by_count.setdefault(key, []).append(row)
    calls = [
        (rows, count, span)
        for (count, whole, _), same in by_count.items()
        for rows in _batches(
            same, 1 if separate_rows else min(most_rows, MANY if count == 1 else max(most // count, 1))
        )
        for span in _spans(count, continues_states, whole, most)
    ]
    if len(calls) == 1 and 0 not in step.counts:
        yield step, None
        return
    starts = [0, *accumulate(step.counts)]
    device = step.tokens.device
    for rows, count, span in calls:
        of_rows = torch.tensor(rows, device=device)
        of_tokens = torch.tensor([starts[row] + n for row in rows for n in span], device=device)
        yield _take(step, rows, span, count - span.stop, of_rows, of_tokens), of_tokens


def _batches(rows: list[int], most: int) -> list[list[int]]:
    return [rows[first : first + most] for first in range(0, len(rows), most)]


def _spans(count: int, continues_states: bool, whole: bool, most: int) -> list[range]:
    """Returns the tokens of each call. Without `continues_states`, a beginning takes up to `most` tokens, and the rest
    one each.
    """
    if continues_states:
        return [range(n, min(n + most, count)) for n in range(0, count, most)]
    first = min(count, most) if whole else 0
    return [*([range(first)] if first else []), *(range(n, n + 1) for n in range(first, count))]


def _take(step: Step, rows: list[int], span: range, left: int, of_rows: Tensor, of_tokens: Tensor) -> Step:
    """Returns a step of some tokens of some rows; `left` tokens of each row follow later."""
    groups: dict[str, PagedInputs | StateInputs] = {}
    for name, inputs in step.groups.items():
        if isinstance(inputs, StateInputs):
            groups[name] = StateInputs(inputs.slots[of_rows])
        else:
            assert inputs.row_index is None, "a step that is captured is not taken apart"
            groups[name] = PagedInputs(inputs.page_table[of_rows], inputs.slots[of_tokens])
    starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=of_rows.device) * len(span)
    return Step(
        step.tokens[of_tokens],
        step.positions[of_tokens],
        starts,
        step.seq_lens[of_rows] - left,
        starts[1:].long() - 1,
        groups,
        [len(span)] * len(rows),
        [step.len_bounds[row] - left for row in rows],
    )
