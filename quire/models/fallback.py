"""Any other causal model of an installed `transformers`: its own code, with its attention swapped for the paged one.

The registry names `FallbackModel` for model types without a family. Its layers are built on meta; a rehearsal there
tells what each layer keeps of a token, so that nothing is guessed from names in a config. A step is one flat sequence
to the model: rows are told apart by their positions and, in attention (`fallback_attention`), by their pages. Slower
than a family's own file, and said so at start.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.table import Ops
from quire.layers.attention import plan_attention
from quire.layers.quant import Dense, Fp16Packed, Scheme
from quire.layers.step import PagedInputs, StateInputs, Step
from quire.layers.weights import Part, Weight
from quire.models.fallback_attention import (
    ATTENTION,
    LayerShape,
    PagedStep,
    Rehearsal,
    paged_attention,
    unsupported,
)
from quire.models.fields import whole
from quire.models.registry import supported_types
from quire.types import CacheSpec, QuireError

SLOWER = "has no file of its own: it runs through transformers, right but slower"
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_OURS = ("model_type", "served_len", "quantization_config")  # the last: weights are decoded when they are read


@dataclass(frozen=True, slots=True)
class FallbackConfig:
    model_type: str
    hf: Any  # transformers' own config
    head_dim: int = 1  # a GGUF's heads are not reordered


class FallbackModel(nn.Module):
    eager_only = True  # other people's code may look at tensors from the host, so it is not captured

    def __init__(self, config: FallbackConfig, *, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device,
                 page_tokens: int, ops: Ops, scheme: Scheme):  # fmt: skip
        super().__init__()
        if not isinstance(scheme, (Dense, Fp16Packed)):
            what = f"{config.model_type} runs through transformers, where weights are not quantized."
            raise QuireError("invalid_parameter", what, "Leave quant out.", param="quant")
        self.ops = ops
        self.notes = (f"{config.model_type} {SLOWER}.",)
        sizes = {key: getattr(config.hf, key, None) for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
        self.vocab_size = whole(sizes, "vocab_size")
        width, _ = whole(sizes, "hidden_size"), whole(sizes, "num_hidden_layers")
        self.max_positions = whole({"max_position_embeddings": getattr(config.hf, "max_position_embeddings", None)},
                                   "max_position_embeddings", 2048)  # fmt: skip
        self.causal = _build_on_meta(config, dtype)
        # Some kernels of other people's code know no other type than bfloat16 on meta.
        self.layer_shapes = _rehearse(_build_on_meta(config, torch.bfloat16), config)
        self.specs = _cache_specs(self.layer_shapes, cache_dtype, page_tokens)
        self.places = {layer: (spec, place) for spec in self.specs for place, layer in enumerate(spec.layers)}
        _rebuild_buffers(self.causal, config.model_type, device)
        _make_weights(self.causal, dtype)
        self.head = _Head(self.causal)
        self.needless_patterns = tuple(getattr(self.causal, "_keys_to_ignore_on_load_unexpected", None) or ())
        widest = max(max(module.weight.shape) for module in self.causal.modules() if isinstance(module, nn.Linear))
        self.activation_elements = 4 * width + 3 * min(widest, 8 * width)

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> FallbackConfig:
        model_type = config["model_type"]
        transformers = _import_transformers(model_type)
        known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if model_type not in known:
            what = (
                f"Model type {model_type} is not supported: transformers {transformers.__version__} has no causal model"
            )
            raise QuireError("unsupported_model", f"{what} of that type either.", supported_types())
        _check_layers(model_type, config.get("layer_types"))
        fields = {key: value for key, value in config.items() if key not in _OURS}
        try:
            hf = transformers.AutoConfig.for_model(model_type, **fields)
        except Exception as error:  # whatever its checks raise
            what = f"transformers refuses this {model_type} config: {_first_line(error)}."
            raise QuireError("bad_config", what, "Check config.json.") from None
        _check_layers(model_type, getattr(hf, "layer_types", None))
        _check_ropes(model_type, hf)
        return FallbackConfig(model_type, hf)

    def forward(self, step: Step, caches: Mapping[str, Tensor]) -> Tensor:
        plans = {spec.group: plan_attention(step, spec, caches[spec.group], self.ops) for spec in self.specs}
        paged = PagedStep({layer: (plans[spec.group], n) for layer, (spec, n) in self.places.items()}, self.ops)
        return step.wanted(_run(self.causal.base_model, step.tokens, step.positions, paged))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, width] -> [n, vocab], with whatever the model does to its logits"""
        return self.head(hidden)

    @torch.inference_mode()
    def verify(self) -> None:
        """Once loaded: two rows in two chunks over pages must come to what transformers' own attention comes to. A
        model that does something unforeseen is refused here, before it says anything wrong."""
        device, dtype = next((p.device, p.dtype) for p in self.causal.parameters())
        count = min(12, self.max_positions)
        rows = torch.arange(2 * count, device=device).view(2, count) * 7 % self.vocab_size
        config = self.causal.config
        config._attn_implementation = "eager"
        try:
            wanted = self.causal(input_ids=rows, use_cache=False).logits.float()
        except Exception as failure:
            raise unsupported(config.model_type, f"its own attention fails: {_first_line(failure)}") from failure
        finally:
            config._attn_implementation = ATTENTION
        caches = {spec.group: torch.zeros(len(spec.layers), 2, 2 * (count // spec.page_tokens + 1), spec.page_tokens,
                                          *spec.shape, dtype=getattr(torch, spec.dtype), device=device)
                  for spec in self.specs}  # fmt: skip
        chunks = [_rehearsed_step(self.specs, rows, *span) for span in ((0, count // 2), (count // 2, count))]
        got = [self.logits(self.forward(step, caches)).float().view(2, -1, self.vocab_size) for step in chunks]
        error = (torch.cat(got, 1) - wanted).abs().max() / wanted.abs().max()
        if not error <= (1e-3 if dtype == torch.float32 else 0.1):
            what = f"its logits would be off by {error:.1%} with pages in place of its own attention"
            raise unsupported(config.model_type, what)


# ---------------------------------------------------------------------------------------------------------------------
# Its body and its head


def _run(base: nn.Module, tokens: Tensor, positions: Tensor, quire: Rehearsal | PagedStep) -> Tensor:
    """tokens [n], positions [n] -> hidden states [n, width]"""
    return base(
        input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, quire=quire
    ).last_hidden_state[0]


class _GivenStates:
    """What a base model returns: hidden states, and nothing where more is asked for."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


class _GivenBody(nn.Module):
    """A base model whose hidden states are already there. Some reach for their body's decoder: it is that, too."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["decoder"] = self

    def forward(self, *unused: Any, inputs_embeds: Tensor, **others: Any) -> _GivenStates:
        return _GivenStates(inputs_embeds)


class _Head:
    """The model with its body left out: hidden states to logits, the way its own forward does it. Not a module, so that
    weights it shares with the whole are not walked over twice."""

    def __init__(self, causal: Any):
        self._model = copy.copy(causal)
        self._model._modules = {**causal._modules, causal.base_model_prefix: _GivenBody()}

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [n, width]"""
        return self._model(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]


# ---------------------------------------------------------------------------------------------------------------------
# Building


def _import_transformers(model_type: str) -> Any:
    try:
        import transformers
    except ImportError:
        what = f"Model type {model_type} is not supported by itself, and transformers, which may know it, is missing."
        raise QuireError(
            "unsupported_model", what, "pip install 'quire[fallback]', or transformers 5 itself."
        ) from None
    transformers.AttentionInterface.register(ATTENTION, paged_attention)
    return transformers


def _check_layers(model_type: str, kinds: Any) -> None:
    other = next((kind for kind in kinds or () if kind not in _KNOWN_LAYERS), None)
    if other is not None:
        raise unsupported(model_type, f"layers of type {other} keep more than keys and values, or are not known")


def _check_ropes(model_type: str, hf: Any) -> None:
    ropes = getattr(hf, "rope_parameters", None) or {}
    for rope in (ropes, *(part for part in ropes.values() if isinstance(part, dict))):
        if rope.get("rope_type") == "longrope":  # its frequencies would follow the longest row of a step
            raise unsupported(model_type, "its rope (longrope) changes with the length of what it is given")


def _build_on_meta(config: FallbackConfig, dtype: torch.dtype) -> Any:
    import transformers

    with torch.device("meta"):
        try:
            causal = transformers.AutoModelForCausalLM.from_config(
                copy.deepcopy(config.hf), attn_implementation=ATTENTION, dtype=dtype
            )
        except Exception as error:  # anything can happen in other people's code
            by_name = isinstance(error, KeyError) and error.args[:1] == (ATTENTION,)
            reason = "it has attention classes of its own" if by_name else _first_line(error)
            raise unsupported(config.model_type, reason) from None
    causal.eval()
    causal.config.pad_token_id = None  # no row is padded, and who looks for padding looks at tensors from the host
    if not getattr(causal, "_supports_attention_backend", False) or getattr(causal, "_is_stateful", False):
        raise unsupported(config.model_type, "its attention can't be exchanged, or it keeps a state of its own")
    return causal


def _rehearse(causal: Any, config: FallbackConfig) -> list[LayerShape]:
    """What each layer keeps, seen in a forward pass on meta, where nothing is computed."""
    rehearsal = Rehearsal()
    tokens = torch.zeros(2, dtype=torch.long, device="meta")
    try:
        _run(causal.base_model, tokens, tokens, rehearsal)
    except QuireError:
        raise
    except Exception as error:  # anything can happen in other people's code
        raise unsupported(config.model_type, f"a rehearsal of it failed: {_first_line(error)}") from None
    num_layers = int(config.hf.num_hidden_layers)
    if sorted(rehearsal.layers) != list(range(num_layers)):
        what = f"{len(rehearsal.layers)} of its {num_layers} layers attend, and others may keep a state"
        raise unsupported(config.model_type, what)
    shapes = [rehearsal.layers[index] for index in range(num_layers)]
    window = None if any(shape.window for shape in shapes) else _window_of_mask(causal, config.hf)
    return shapes if window is None else [replace(shape, window=window) for shape in shapes]


def _window_of_mask(causal: Any, hf: Any) -> int | None:
    """Some models tell their mask of a window and not their attention, and give neither to one that makes no use of
    masks. Those that have it in some layers only say which (`layer_types`), and tell the attention of each."""
    masks = hasattr(sys.modules[type(causal).__module__], "create_sliding_window_causal_mask")
    window = getattr(hf, "sliding_window", None)
    return window if masks and getattr(hf, "layer_types", None) is None else None


def _cache_specs(shapes: list[LayerShape], dtype: torch.dtype, page_tokens: int) -> list[CacheSpec]:
    """Layers that keep the same, over the same window, are one group."""
    groups: dict[tuple[int | None, int, int], list[int]] = {}
    for layer, shape in enumerate(shapes):
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


def _rebuild_buffers(causal: Any, model_type: str, device: torch.device) -> None:
    """Tables that are in no checkpoint (frequencies, scales): made anew the way the model itself initialises them."""
    kept = set(causal.state_dict())
    for prefix, module in causal.named_modules():
        names = [name for name, _ in module.named_buffers(recurse=False) if _join(prefix, name) not in kept]
        for name in names:
            old = module._buffers[name]
            fill = math.nan if old.is_floating_point() else -1
            module._buffers[name] = torch.full(old.shape, fill, dtype=old.dtype, device=device)
        if names:
            with torch.no_grad():
                causal._init_weights(module)
        for name in names:
            value = module._buffers[name]
            if value.is_floating_point() and value.isnan().any():
                raise unsupported(model_type, f"its table {_join(prefix, name)} can't be made anew")


def _rehearsed_step(specs: list[CacheSpec], rows: Tensor, start: int, stop: int) -> Step:
    """Tokens start : stop of each row, as a step; row r's pages are the r-th share of each group's."""
    num_rows, count = rows.shape[0], stop - start
    positions = torch.arange(start, stop, device=rows.device).repeat(num_rows)
    groups: dict[str, PagedInputs | StateInputs] = {}
    for spec in specs:
        pages = rows.shape[1] // spec.page_tokens + 1
        table = torch.arange(num_rows * pages, dtype=torch.int32, device=rows.device).view(num_rows, pages)
        owner = torch.arange(num_rows, device=rows.device).repeat_interleave(count)
        slots = table[owner, positions // spec.page_tokens].long() * spec.page_tokens + positions % spec.page_tokens
        groups[spec.group] = PagedInputs(table, slots)
    starts = torch.arange(num_rows + 1, dtype=torch.int32, device=rows.device) * count
    lens = torch.full((num_rows,), stop, dtype=torch.int32, device=rows.device)
    return Step(rows[:, start:stop].reshape(-1), positions, starts, lens, starts[1:].long() - 1, groups,
                [count] * num_rows, [stop] * num_rows)  # fmt: skip


def _make_weights(causal: Any, dtype: torch.dtype) -> None:
    """Every parameter, and every buffer that is in checkpoints, becomes a weight that names its checkpoint tensor. Tied
    ones name the same tensor, and the loader then makes them one."""
    names: dict[int, str] = {}
    for prefix, module in list(causal.named_modules()):
        kept_buffers = [(name, value) for name, value in module._buffers.items() if value is not None and value.is_meta]
        for name, value in [*module._parameters.items(), *kept_buffers]:
            if value is None or isinstance(value, Weight):
                continue
            first = names.setdefault(id(value), _join(prefix, name))
            shape = tuple(value.shape)
            kept = dtype if value.is_floating_point() else value.dtype
            rows = shape or (1,)  # a single number is kept as a row of one
            layouts = [(Part(called, shape, 0, rows[0]),) for called in _checkpoint_names(first)]
            weight = Weight(rows, kept, layouts[0], tuple(layouts[1:]))
            module._buffers.pop(name, None)
            module._parameters[name] = weight


def _checkpoint_names(name: str) -> list[str]:
    """What a checkpoint may call a parameter: as the model does, or as it once did."""
    return [name, name.replace("lm_head.", "embed_out.")] if name.startswith("lm_head.") else [name]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _first_line(error: Exception) -> str:
    """With what follows it, where the first line only announces that. A key error says no more than the key."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return (f"it does not know {said}" if isinstance(error, KeyError) else said)[:300].rstrip(".")
