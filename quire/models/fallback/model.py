"""Runs any other causal model of an installed `transformers`: its own code, with its attention replaced by paged
attention.

The registry names `FallbackModel` for model types without a family. A dry run finds what each layer keeps (`dry_run`),
so that nothing is inferred from names in a config. A step is one flat sequence to the model: positions and, in
attention (`attention`), pages separate the rows. Where layers keep a state (`recurrent_states`), rows with equally many
tokens are a batch. It is slower than a model family, which a note at start says.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quire.layers.attention import plan_attention
from quire.layers.build import Build
from quire.layers.kv_specs import refuse_packing
from quire.layers.quant import Dense, Fp16Packed
from quire.layers.step import PagedInputs, StateInputs, Step
from quire.models.fallback.attention import PagedStep, unsupported
from quire.models.fallback.build import (
    body_name,
    body_of,
    build_on_meta,
    cache_specs,
    check_ropes,
    first_line,
    import_transformers,
    index_specs,
    is_causal,
    make_weights,
    rebuild_buffers,
    run_body,
)
from quire.models.fallback.capture import can_capture
from quire.models.fallback.dry_run import CALL_BYTES, check_layers, find_cache_layout, measure_call
from quire.models.fallback.gathered_attention import GatheredRow
from quire.models.fallback.opaque_states import OpaqueRowStates
from quire.models.fallback.recurrent_states import MANY, RowStates, StateSlots, place_layers, split_rows
from quire.models.families.mamba2 import MAX_POSITIONS
from quire.models.fields import whole
from quire.models.model import Model
from quire.models.registry import supported_types
from quire.types import CacheSpec, QuireError

SLOWER = "has no family of its own: it runs through transformers, correctly but slower"
ROW_BY_ROW = ", with its own attention, one row at a time"
TOKEN_BY_TOKEN = (
    "can't continue from a state with several tokens: a prompt beyond its first chunk is computed token by token"
)
NO_BATCHES = "does not support batches: each row is computed by itself"
NOT_CAPTURED = (
    "reads tensors on the host while it computes: its steps are not captured as CUDA graphs, which is slower still"
)
# fields that are Quire's own or that transformers must not act on; weights are decoded while loading
_OURS = ("model_type", "served_len", "quantization_config", "tensor_types")


@dataclass(frozen=True, slots=True)
class FallbackConfig:
    """A transformers config, and what Quire knows beyond it."""

    model_type: str
    hf: Any  # config class of transformers
    served_len: int | None = None  # maximum sequence length that is served, if known
    head_dim: int = 1  # rows of GGUF heads are not permuted


class FallbackModel(nn.Module, Model):
    """A transformers model with Quire's caches."""

    def __init__(
        self,
        config: FallbackConfig,
        build: Build,
    ):
        super().__init__()
        if not all(isinstance(scheme, (Dense, Fp16Packed)) for scheme in build.schemes.kinds):
            what = f"{config.model_type} runs through transformers, where weights can't be quantized."
            raise QuireError("invalid_parameter", what, "Leave quant out.", param="quant")
        refuse_packing(build, f"{config.model_type}, which runs through transformers")
        self.ops = build.ops
        sizes = {key: getattr(config.hf, key, None) for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
        self.vocab_size = whole(sizes, "vocab_size")
        width, _ = whole(sizes, "hidden_size"), whole(sizes, "num_hidden_layers")
        layout = find_cache_layout(config.hf)
        self.max_positions = _max_positions(config.hf, 2048 if layout.shapes else MAX_POSITIONS)
        self.causal = build_on_meta(config.hf, build.dtype, layout.attention)
        self.gathers, self.own = layout.gathers, layout.own
        self._note = f"{config.model_type} {SLOWER}{ROW_BY_ROW if layout.gathers else ''}."
        self._eager_only = True  # until `verify` has found that decode steps can be captured
        self.layer_shapes = layout.shapes
        self.paged_specs = cache_specs(layout.shapes, build.cache_dtype, build.page_tokens)
        self.states = StateSlots.of(layout.states, build.dtype, build.page_tokens)
        index = index_specs(layout.index_dims, build.cache_dtype, build.page_tokens)
        self.specs = [*self.paged_specs, *index, *self.states.specs]
        # Assumed until `verify` measures it: layers continue from a state with several tokens, and batches are
        # possible.
        self.continues_states, self.separate_rows = True, layout.gathers
        self._call_rows = MANY if layout.own is None else max(CALL_BYTES // self.states.layer_bytes, 1)
        self.places, self.index_places = place_layers(self.paged_specs), place_layers(index)
        rebuild_buffers(self.causal, config.model_type, build.device)
        make_weights(self.causal, build.dtype)
        self.head = _Head(self.causal)
        self._ignored_patterns = tuple(getattr(self.causal, "_keys_to_ignore_on_load_unexpected", None) or ())
        widest = max(max(module.weight.shape) for module in self.causal.modules() if isinstance(module, nn.Linear))
        self.activation_elements = 4 * width + 3 * min(widest, 8 * width)
        self._call_tokens, self._call_bytes = 0, 0
        if layout.states or layout.gathers:
            max_len = min(self.max_positions, config.served_len or self.max_positions)
            self._call_tokens, self._call_bytes = measure_call(config.hf, layout, build.dtype, max_len)

    def is_eager_only(self) -> bool:
        return self._eager_only

    def captures_decodes_only(self) -> bool:
        return True

    def start_notes(self) -> Sequence[str]:
        return (self._note,)

    def ignored_patterns(self) -> tuple[str, ...]:
        return self._ignored_patterns

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> FallbackConfig:
        model_type = config["model_type"]
        transformers = import_transformers(model_type)
        if not is_causal(model_type):
            what = (
                f"Model type {model_type} is not supported: transformers {transformers.__version__} has no causal model"
            )
            raise QuireError("unsupported_model", f"{what} of that type either.", supported_types(model_type))
        for kinds in ("layer_types", "layers_block_type"):
            check_layers(model_type, config.get(kinds))
        fields = {key: value for key, value in config.items() if key not in _OURS}
        try:
            hf = transformers.AutoConfig.for_model(model_type, **fields)
        except Exception as error:  # config checks of transformers can raise anything
            what = f"transformers refuses this {model_type} config: {first_line(error)}."
            raise QuireError("bad_config", what, "Check config.json.") from None
        check_layers(model_type, getattr(hf, "layer_types", None))
        check_ropes(model_type, hf)
        return FallbackConfig(model_type, hf, config.get("served_len"))

    def forward(self, step: Step, caches: Mapping[str, Tensor]) -> Tensor:
        if not self.states.specs and not self.gathers:
            return step.wanted(self._run(step, 1, self._page(step, caches), None))
        hidden = None
        how = (self.continues_states, self.separate_rows, self._call_tokens, self.own is not None, self._call_rows)
        for part, of_tokens in split_rows(step, *how):
            rows = self._rows(part, caches)
            x = self._run(part, len(part.counts), None if self.gathers else self._page(part, caches), rows)
            rows.flush()
            if of_tokens is None:
                return step.wanted(x)
            if hidden is None:
                hidden = x.new_empty(len(step.tokens), x.shape[1])
            hidden[of_tokens] = x
        assert hidden is not None
        return step.wanted(hidden)

    def _rows(self, step: Step, caches: Mapping[str, Tensor]) -> RowStates:
        if self.gathers:
            return GatheredRow(self.states, step, caches, self.places, self.index_places)
        if self.own is not None:
            return OpaqueRowStates(self.own, self.states, step, caches)
        return RowStates(self.states, step, caches)

    def _page(self, step: Step, caches: Mapping[str, Tensor]) -> PagedStep:
        plans = {spec.group: plan_attention(step, spec, caches[spec.group], self.ops) for spec in self.paged_specs}
        return PagedStep({layer: (plans[spec.group], n) for layer, (spec, n) in self.places.items()}, self.ops)

    def _run(self, step: Step, num_rows: int, paged: PagedStep | None, states: RowStates | None) -> Tensor:
        """Returns the hidden states of all tokens, [tokens, width], computed as a batch of `num_rows` rows."""
        positions = step.positions.clamp(min=0)  # padding tokens have position -1, which some models look up in a table
        tokens, positions = step.tokens.view(num_rows, -1), positions.view(num_rows, -1)
        return run_body(body_of(self.causal), tokens, positions, paged, states).flatten(0, 1)

    def work_bytes(self, max_rows: int) -> int:
        """Returns the bytes that a call takes beyond its activations, for the memory plan: a few of its largest
        tensors, and the states of one layer for all rows.
        """
        return 3 * self._call_bytes + 4 * min(max_rows, self._call_rows) * self.states.layer_bytes

    def logits(self, hidden: Tensor) -> Tensor:
        """Maps hidden [n, width] to logits [n, vocab], including what the model does to its logits."""
        return self.head(hidden)

    @torch.inference_mode()
    def verify(self) -> list[str]:
        """Compares two rows in three chunks over pages with the model's own attention, once weights are loaded.

        A model whose results differ is refused here, before it can give a wrong answer. Returns notes about what it
        can't do.
        """
        device = next(self.causal.parameters()).device
        count = min(12, self.max_positions)
        rows = torch.arange(2 * count, device=device).view(2, count) * 7 % self.vocab_size
        config = self.causal.config
        wanted = self._own_logits(rows)
        if getattr(config, "is_decoder", None) is False and self._sees_later_tokens(rows, wanted):
            raise unsupported(
                config.model_type, "it is not a decoder (is_decoder is false) and attends to later tokens"
            )
        most = 1e-3 if self.states.dtype == torch.float32 else 0.1
        self._choose_batching(rows, wanted, most)
        notes = [] if self.continues_states else [f"{config.model_type} {TOKEN_BY_TOKEN}."]
        notes += [f"{config.model_type} {NO_BATCHES}."] if self.separate_rows and not self.gathers else []
        if device.type == "cuda" and self.ops.captures and not self.separate_rows and self.own is None:
            self._eager_only = not self._captures(rows, most)
            notes += [f"{config.model_type} {NOT_CAPTURED}."] if self._eager_only else []
        return notes

    def _own_logits(self, rows: Tensor) -> Tensor:
        """Returns the logits of the model without a cache, [rows, n, vocab]."""
        config = self.causal.config
        attention, config._attn_implementation = config._attn_implementation, "eager"
        try:
            return self.causal(input_ids=rows, use_cache=False).logits.float()
        except Exception as failure:
            raise unsupported(config.model_type, f"its own attention fails: {first_line(failure)}") from failure
        finally:
            config._attn_implementation = attention

    def _sees_later_tokens(self, rows: Tensor, logits: Tensor) -> bool:
        """Returns whether another last token changes logits before it. The change may be small: in half precision an
        encoder could pass for a decoder.
        """
        others = rows.clone()
        others[:, -1] = (others[:, -1] + 1) % self.vocab_size
        changed = (self._own_logits(others) - logits)[:, :-1].abs().max()
        return not bool(changed <= 1e-4 * logits.abs().max())

    def _choose_batching(self, rows: Tensor, wanted: Tensor, most: float) -> None:
        """Chooses how rows are passed so that logits are right: rows with states as batches if possible, else one by
        one.
        """
        ways = (False, True) if self.states.specs and not self.gathers else (self.separate_rows,)
        for self.separate_rows in ways:
            try:
                self.continues_states = not self.states.specs or self._can_continue_states(rows)
                error = self._error(rows, wanted)
            except QuireError:
                if self.separate_rows == ways[-1]:
                    raise
                continue
            if error <= most:
                return
        what = f"its logits differ by {error:.1%} with paged attention in place of its own"
        raise unsupported(self.causal.config.model_type, what)

    def _captures(self, rows: Tensor, most: float) -> bool:
        num_rows, count = rows.shape
        caches = {spec.group: _empty_cache(spec, num_rows, count, rows.device) for spec in self.specs}
        self._try(_probe_step(self.specs, rows, 0, count - 1), caches)
        step = _probe_step(self.specs, rows, count - 1, count)
        for inputs in step.groups.values():
            if isinstance(inputs, PagedInputs):
                inputs.row_index = torch.arange(num_rows, device=rows.device)
        return can_capture(lambda: self.logits(self.forward(step, caches)), caches, most)

    def _can_continue_states(self, rows: Tensor) -> bool:
        """Returns whether layers continue from a state with several tokens as they do one by one.

        Logits may not show it, since a state of few tokens may have little effect. So states are filled with random
        numbers, and the difference of both ways is compared with the effect of these numbers. A short convolution may
        have none left.
        """
        left, rounding = [], min(16 * torch.finfo(self.states.dtype).eps, 0.03)
        for drawn, together in ((True, True), (True, False), (False, False)):
            caches = {spec.group: _empty_cache(spec, len(rows), 3, rows.device) for spec in self.specs}
            generator = torch.Generator().manual_seed(0)
            for layer, (spec, place) in self.states.places.items() if drawn else ():
                self.states.fill(layer, caches[spec.group][place], generator)
            spans = ((1, 3),) if together else ((1, 2), (2, 3))  # a row that begins need not continue from a state
            hidden = [self._try(_probe_step(self.specs, rows[:, :3], *span), caches) for span in spans]
            kept = [caches[spec.group][place] for spec, place in self.states.places.values()]
            left.append([hidden[-1].view(len(rows), -1, hidden[-1].shape[1])[:, -1].float(), *kept])
        return all(
            (at_once - one_by_one).norm() <= 0.5 * (one_by_one - without).norm() + rounding * one_by_one.norm()
            for at_once, one_by_one, without in zip(*left, strict=True)
        )

    def _error(self, rows: Tensor, wanted: Tensor) -> float:
        """Returns the largest error of logits of `rows` [rows, n], computed in three chunks, relative to the largest
        logit.
        """
        num_rows, count = rows.shape
        # the last span is one token, as in decode
        spans = ((0, count // 2), (count // 2, count - 1), (count - 1, count))
        caches = {spec.group: _empty_cache(spec, num_rows, count, rows.device) for spec in self.specs}
        hidden = [self._try(_probe_step(self.specs, rows, *span), caches) for span in spans]
        got = [self.logits(part).float().view(num_rows, -1, self.vocab_size) for part in hidden]
        return float((torch.cat(got, 1) - wanted).abs().max() / wanted.abs().max())

    def _try(self, step: Step, caches: Mapping[str, Tensor]) -> Tensor:
        try:
            return self.forward(step, caches)
        except QuireError:
            raise
        except Exception as failure:  # model code of transformers can raise anything
            raise unsupported(
                self.causal.config.model_type, f"it fails with paged attention: {first_line(failure)}"
            ) from failure


# ---------------------------------------------------------------------------------------------------------------------
# The model's body and head


class _PrecomputedOutput:
    """Output of a base model that holds given hidden states; all other fields are None."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


class _PrecomputedBody(nn.Module):
    """A base model that returns given hidden states. It also serves as the decoder of its body, and has the body's
    attributes, since some heads read them.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.__dict__["decoder"] = self
        self.__dict__["body"] = body  # not a submodule, so that its weights are not visited twice

    def __getattr__(self, name: str) -> Any:
        return getattr(self.body, name)

    def forward(self, *unused: Any, inputs_embeds: Tensor, **others: Any) -> _PrecomputedOutput:
        return _PrecomputedOutput(inputs_embeds)


class _Head:
    """The model without its body: maps hidden states to logits by the model's own forward. Not a module, so that
    weights it shares with the whole are not visited twice.
    """

    def __init__(self, causal: Any):
        self._model = copy.copy(causal)
        self._model._modules = {**causal._modules, body_name(causal): _PrecomputedBody(body_of(causal))}

    def __call__(self, hidden: Tensor) -> Tensor:
        """Maps hidden [n, width] to logits [n, vocab]."""
        return self._model(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]


def _probe_step(specs: list[CacheSpec], rows: Tensor, start: int, stop: int) -> Step:
    """Returns a step over tokens start : stop of each row; row r has the r-th share of each group's pages."""
    num_rows, count = rows.shape[0], stop - start
    positions = torch.arange(start, stop, device=rows.device).repeat(num_rows)
    groups: dict[str, PagedInputs | StateInputs] = {}
    for spec in specs:
        if spec.kind == "state":
            groups[spec.group] = StateInputs(torch.arange(num_rows, device=rows.device))
            continue
        pages = rows.shape[1] // spec.page_tokens + 1
        table = torch.arange(num_rows * pages, dtype=torch.int32, device=rows.device).view(num_rows, pages)
        owner = torch.arange(num_rows, device=rows.device).repeat_interleave(count)
        slots = table[owner, positions // spec.page_tokens].long() * spec.page_tokens + positions % spec.page_tokens
        groups[spec.group] = PagedInputs(table, slots)
    starts = torch.arange(num_rows + 1, dtype=torch.int32, device=rows.device) * count
    lens = torch.full((num_rows,), stop, dtype=torch.int32, device=rows.device)
    return Step(
        rows[:, start:stop].reshape(-1),
        positions,
        starts,
        lens,
        starts[1:].long() - 1,
        groups,
        [count] * num_rows,
        [stop] * num_rows,
    )


def _max_positions(hf: Any, default: int) -> int:
    names = ("max_position_embeddings", "model_max_length", "max_seq_len", "seq_length")
    name = next((name for name in names if getattr(hf, name, None) is not None), names[0])
    return whole({name: getattr(hf, name, None)}, name, default)


def _empty_cache(spec: CacheSpec, num_rows: int, length: int, device: torch.device) -> Tensor:
    shape: tuple[int, ...] = (len(spec.layers), num_rows)
    if spec.kind == "paged":
        shape = (len(spec.layers), spec.planes, num_rows * (length // spec.page_tokens + 1), spec.page_tokens)
    return torch.zeros(*shape, *spec.shape, dtype=getattr(torch, spec.dtype), device=device)
