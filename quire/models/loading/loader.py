"""Turns a model's files into a model that can run: config, memory check, building on meta, weights, defaults.

`startup.assemble` calls `load_model` for an engine, and `read_config` and `build_model` alone for a memory plan.
Safetensors folders and GGUF files both become the fields of a config.json and named tensors here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from quire.files.gguf import GGUFFile, open_gguf
from quire.files.progress import Progress, QuietProgress, format_bytes
from quire.files.safetensors import list_shards
from quire.files.source import ModelFiles
from quire.kernels.cache_forms import CACHE_FORMS, parse_layers
from quire.kernels.table import REFERENCE, Ops, select_ops, with_packed_cache
from quire.kernels.validation.trial_results import Findings
from quire.layers.build import Build
from quire.layers.experts import Experts
from quire.layers.moe import MoE
from quire.layers.quant import Dense, Fp8, Fp16Packed, Scheme
from quire.layers.quant.schemes import Schemes
from quire.layers.split import cannot_split
from quire.layers.weights import iter_weights, weights_bytes
from quire.models.adapters.places import Places
from quire.models.checkpoint import Checkpoint
from quire.models.fallback.model import FallbackModel
from quire.models.fallback.tensor_names import RenamedCheckpoint
from quire.models.gguf import checkpoint as gguf
from quire.models.loading.deterministic_support import select_deterministic_ops
from quire.models.loading.device_memory import available_memory
from quire.models.loading.kernel_trials import Trials, select_kernels
from quire.models.loading.language_model_part import LanguageModelCheckpoint, language_model_config
from quire.models.loading.shards import SafetensorsCheckpoint
from quire.models.loading.sources import CheckpointFill, Fill, GGUFCheckpoint, RandomFill, fill_model
from quire.models.model import Model
from quire.models.packed import read_quantization
from quire.models.quantized import check_quantized, list_unquantized
from quire.models.registry import find_family, find_model_type
from quire.models.stages import WHOLE, Stage
from quire.parallel.communicator import ALONE, Communicator
from quire.types import QuireError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")  # GGUF tensor types that are plain floats
_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights, and what the files say about it."""

    model: Model
    config: Any  # the family's own config class, DenseConfig for example
    dtype: str  # of the weights; the types of computation and cache are in the model's cache specs
    max_model_len: int
    weights_bytes: int
    places: Places  # the weights that adapters can change
    eos_ids: tuple[int, ...] = ()  # from the folder; the tokenizer reads those of a GGUF file
    generation_defaults: dict[str, Any] = field(
        default_factory=dict
    )  # published sampling parameters, by SamplingParams name


def load_model(
    files: ModelFiles,
    *,
    dtype: str,
    device: torch.device,
    max_model_len: int | None,
    page_tokens: int,
    random_weights: bool = False,
    quant: str = "none",
    kv_dtype: str = "auto",
    kv_skip: str | None = None,
    kernels: str = "auto",
    strict_kernels: bool = False,
    deterministic: bool = False,
    findings: Findings | None = None,
    progress: Progress | None = None,
    communicator: Communicator = ALONE,
    whole_experts: bool = False,
    stage: Stage = WHOLE,
) -> LoadedModel:
    """Reads the config, builds the model on meta, checks that it fits in memory and fills its weights.

    Whatever is wrong with the files is a QuireError. `findings`: results of trials at an earlier start, which this
    start extends. `communicator`: the ranks that share each layer; `stage`: this rank's pipeline stage. A rank reads
    its own share of the weights only.
    """
    file = open_gguf(files.path) if files.kind == "gguf" else None
    hf_config = _hf_config(files, file)
    model, config = build_tried_model(
        hf_config,
        dtype=dtype,
        device=device,
        at=device,
        max_model_len=max_model_len,
        page_tokens=page_tokens,
        quant=quant,
        kv_dtype=kv_dtype,
        kv_skip=kv_skip,
        kernels=kernels,
        strict_kernels=strict_kernels,
        deterministic=deterministic,
        findings=findings,
        communicator=communicator,
        whole_experts=whole_experts,
    )
    in_blocks = keeps_blocks(model, dtype, hf_config)
    dtype = resolve_dtype(dtype, device, hf_config)
    max_model_len = _resolve_len(max_model_len, model.max_positions)
    eos_ids = () if file is not None else read_eos_ids(files.generation_config, hf_config, model.vocab_size)
    smaller = quant == "none" and supports_fp8(model, device, kernels, deterministic)
    for note in list_notes(model, files, hf_config, dtype, quant, smaller, in_blocks):
        warnings.warn(note, stacklevel=2)
    fill: Fill | None = None
    if stage.count > 1:
        fill = _open_fill(model, files, file, hf_config, device, random_weights)  # checks all tensors, of all stages
        model.take_stage(stage)
    num_bytes = _check_fits(weights_bytes(model), device, files.name, smaller)
    places = Places(model)  # before loading, since real weights do not know their checkpoint's names
    progress = progress or QuietProgress()
    progress.start(f"Loading {files.name}", num_bytes)
    try:
        fill = fill or _open_fill(model, files, file, hf_config, device, random_weights)
        fill_model(model, fill, device, progress.update)
    finally:
        progress.finish()
    if isinstance(model, FallbackModel):
        for note in model.verify():
            warnings.warn(note, stacklevel=2)
    defaults = generation_defaults(files.generation_config)
    if file is not None:
        defaults |= gguf.sampling_defaults(file)
    return LoadedModel(model, config, dtype, max_model_len, num_bytes, places, eos_ids, defaults)


def _open_fill(
    model: Any,
    files: ModelFiles,
    file: GGUFFile | None,
    hf_config: Mapping[str, Any],
    device: torch.device,
    random_weights: bool,
) -> Fill:
    """Returns the source of the model's weights, after a check of all names and shapes."""
    if random_weights:
        return RandomFill(device)
    if file is not None:
        return CheckpointFill(model, GGUFCheckpoint(file, hf_config["head_dim"]))
    shards: Checkpoint = open_shards(files)
    if isinstance(model, FallbackModel):
        shards = RenamedCheckpoint(shards, model.causal)
    return CheckpointFill(model, shards)


def build_tried_model(
    hf_config: Mapping[str, Any],
    *,
    dtype: str,
    device: torch.device,
    at: torch.device,
    max_model_len: int | None,
    page_tokens: int,
    quant: str,
    kv_dtype: str,
    kernels: str,
    strict_kernels: bool,
    deterministic: bool,
    kv_skip: str | None = None,
    findings: Findings | None = None,
    communicator: Communicator = ALONE,
    whole_experts: bool = False,
) -> tuple[Any, Any]:
    """Returns the model on meta, built with the ops that passed their trials, and its config.

    `at`: the device of trials and of the model's own tables; meta in a dry run, which only finds the kernels that the
    device would launch.
    """
    # several times slower there, and on some processors torch crashes in it
    if device.type == "cpu" and dtype == "bfloat16":
        what = "dtype=bfloat16 is not supported on a CPU."
        raise QuireError("invalid_parameter", what, "Use float32, or float16 for half the memory.", param="dtype")
    if deterministic:
        ops = _deterministic_ops(hf_config, device, dtype, quant, kv_dtype, kernels)
    else:
        ops = select_ops(device.type, kernels, strict_kernels)
    build = partial(
        build_model,
        {**hf_config, "served_len": max_model_len},
        dtype=dtype,
        device=device,
        at=at,
        page_tokens=page_tokens,
        quant=quant,
        kv_dtype=kv_dtype,
        kv_skip=kv_skip,
        communicator=communicator,
        whole_experts=whole_experts,
    )
    model, config = build(ops=ops)
    trials = Trials(
        model, DTYPES[resolve_dtype(dtype, device, hf_config)], at, _resolve_len(max_model_len, model.max_positions)
    )
    tried = select_kernels(
        ops, trials, kernels=kernels, strict=strict_kernels, deterministic=deterministic, findings=findings
    )
    return (model, config) if tried is ops else build(ops=tried)


def supports_fp8(model: Any, device: torch.device, kernels: str, deterministic: bool) -> bool:
    """Returns whether `--quant fp8` is possible for this model and device."""
    is_own = not isinstance(model, FallbackModel)
    return is_own and device.type == "cuda" and kernels != "torch" and not deterministic


def keeps_blocks(model: Any, dtype: str, hf_config: Mapping[str, Any]) -> bool:
    """Returns whether tensors that a checkpoint keeps packed stay in quantized blocks."""
    types = _tensor_types(dtype, hf_config)
    return bool(types) and any(weight.packing is not None for _, _, weight in iter_weights(model))


def list_notes(
    model: Any, files: ModelFiles, hf_config: Mapping[str, Any], dtype: str, quant: str, smaller: bool, in_blocks: bool
) -> list[str]:
    """Returns the notes to show when the model starts. `smaller`: FP8 is possible and was not requested; `in_blocks`:
    packed tensors are not decoded.
    """
    notes = [*model.start_notes(), *list_unquantized(model, quant)]
    if language_model_config(files.config or {}) is not None:
        notes.append(f"{files.name} runs as a text-only model; its parts for images are not loaded.")
    if files.vision_part is not None:
        notes.append(f"{files.name} runs as a text-only model; {files.vision_part}, its vision part, is not loaded.")
    quantized = read_quantization(hf_config)
    if quantized is not None and quant == "none" and not in_blocks:
        keeps = f" (`--quant fp8` {quantized.fp8_note})" if smaller else ""
        notes.append(
            f"{files.name} is quantized ({quantized.display_name}); "
            f"its weights are decoded to {dtype} while loading{keeps}."
        )
    return notes


def read_config(files: ModelFiles) -> dict[str, Any]:
    """Returns the fields of a config.json: the folder's own, or their equivalent from a GGUF file's metadata."""
    return _hf_config(files, open_gguf(files.path) if files.kind == "gguf" else None)


def build_model(
    hf_config: Mapping[str, Any],
    *,
    dtype: str,
    device: torch.device,
    page_tokens: int,
    quant: str = "none",
    kv_dtype: str = "auto",
    kv_skip: str | None = None,
    ops: Ops | None = None,
    at: torch.device | None = None,
    communicator: Communicator = ALONE,
    whole_experts: bool = False,
) -> tuple[Any, Any]:
    """Returns the model on meta, without memory for weights, and its config. `ops`: the device's own by default; `at`:
    the device of the model's own tables, `device` by default.
    """
    read_quantization(hf_config)  # raises for a quantization that can't be decoded
    model_type = find_model_type(hf_config)
    family = find_family(model_type)
    config = _read_config(family, {**hf_config, "model_type": model_type})
    if communicator.size > 1 and family is FallbackModel:
        raise cannot_split(f"{model_type}, which runs through transformers,", communicator.size)
    ops = ops or select_ops(device.type)
    if ops.native is not None and not _runs_natively(family, config, quant, dtype, hf_config):
        ops = REFERENCE
    build = make_build(
        hf_config,
        dtype=dtype,
        device=device,
        page_tokens=page_tokens,
        quant=quant,
        kv_dtype=kv_dtype,
        kv_skip=kv_skip,
        ops=ops,
        at=at,
    ).with_communicator(communicator, whole_experts)
    with _one_line_errors(model_type):
        model = family(config, build=build)
    if whole_experts:
        _check_exchanged(model, model_type)
    check_quantized(model, quant)
    return model, config


def _check_exchanged(model: Any, model_type: str) -> None:
    """Raises an error for a model without experts, or with experts that can't be shared out whole."""
    mixtures = [module for module in model.modules() if isinstance(module, Experts)]
    if not mixtures:
        what = f"A {model_type} model has no experts."
        raise QuireError("unsupported_split", what, "Use tensor parallelism.", param="ep")
    exchanged = {id(module.experts) for module in model.modules() if isinstance(module, MoE)}
    if any(id(experts) not in exchanged for experts in mixtures):
        what = f"The experts of {model_type} models can't be shared out whole."
        raise QuireError("unsupported_split", what, "Use tensor parallelism.", param="ep")


def make_build(
    hf_config: Mapping[str, Any],
    *,
    dtype: str,
    device: torch.device,
    page_tokens: int,
    quant: str,
    kv_dtype: str,
    ops: Ops,
    kv_skip: str | None = None,
    at: torch.device | None = None,
) -> Build:
    """Returns how a model with these ops, or a part of it, is built. `at`: see `build_model`."""
    compute_dtype, scheme = _choose_scheme(dtype, device, ops, quant, hf_config)
    cache_dtype = _cache_dtype(kv_dtype, compute_dtype, device, ops)
    if kv_dtype in CACHE_FORMS and device.type == "cuda" and ops is not REFERENCE:
        ops = with_packed_cache(ops)
    build = Build(compute_dtype, cache_dtype, at or device, page_tokens, ops, Schemes(scheme))
    if kv_dtype not in CACHE_FORMS:
        if kv_skip:
            what = "--kv-dtype-skip names layers that are not packed, and this cache is not."
            raise QuireError("invalid_parameter", what, "Add --kv-dtype int8, k8v4 or q4.", param="kv_dtype_skip")
        return build
    return replace(
        build, packing=kv_dtype, whole_layers=parse_layers(kv_skip or "", hf_config.get("num_hidden_layers"))
    )


def _read_config(family: Any, hf_config: Mapping[str, Any]) -> Any:
    with _one_line_errors(hf_config["model_type"]):
        return family.read_config(hf_config)


@contextmanager
def _one_line_errors(model_type: str) -> Iterator[None]:
    """Turns an unexpected exception of a family into a one-line error. The expected ones name the wrong field
    themselves.
    """
    try:
        yield
    except QuireError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        what = f"This {model_type} config is invalid ({type(error).__name__}: {reason})."
        raise QuireError("bad_config", what, "Check config.json.") from error


def resolve_dtype(dtype: str, device: torch.device, hf_config: Mapping[str, Any]) -> str:
    """Resolves "auto": float32 on a CPU, where other types are slower, and the checkpoint's own type elsewhere."""
    if dtype != "auto":
        return dtype
    if device.type == "cpu":
        return "float32"
    own = str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return own if own in DTYPES else "bfloat16"


def _runs_natively(family: Any, config: Any, quant: str, dtype: str, hf_config: Mapping[str, Any]) -> bool:
    """Returns whether the native library runs the model on a CPU: in one call, or op by op where weights are in blocks.
    Plain float weights in other models stay with torch, which is faster at products of many tokens.
    """
    if family is FallbackModel:
        return False
    has_blocks = not set(_tensor_types(dtype, hf_config).values()) <= set(FLOAT_TYPES)
    return quant != "none" or has_blocks or _fits_native(family, config)


def _fits_native(family: Any, config: Any) -> bool:
    """Returns whether the native library runs all layers in one call."""
    return bool(family.fits_native(config))


def _choose_scheme(
    dtype: str, device: torch.device, ops: Ops, quant: str, hf_config: Mapping[str, Any]
) -> tuple[torch.dtype, Scheme]:
    """Returns the dtype of the computation and the scheme of linear weights."""
    types = _tensor_types(dtype, hf_config)
    dtype = resolve_dtype(dtype, device, hf_config)
    if quant == "fp8":
        _need_cuda("quant=fp8", device, ops)
        return DTYPES[dtype], Fp8(ops)
    if quant == "keep":
        return DTYPES[dtype], _keep_bits(device, ops, hf_config)
    if quant != "none" and (ops.native is None or dtype == "bfloat16"):
        what = f"quant={quant} needs a CPU, the native kernels and a model type with a family of its own."
        raise QuireError("invalid_parameter", what, "Leave it out, or see `quire doctor`.", param="quant")
    if ops.native is not None and dtype != "bfloat16":
        from quire.layers.quant.blocks import QUANTS, QuantizedBlocks

        floats = "F16" if dtype == "float16" else "F32"
        return torch.float32, QuantizedBlocks(ops, types=types, floats=floats, quant=QUANTS.get(quant))
    if device.type == "cpu" and dtype == "float16" and Fp16Packed.is_supported():
        return torch.float32, Fp16Packed(ops)
    return DTYPES[dtype], Dense(ops)


def _keep_bits(device: torch.device, ops: Ops, hf_config: Mapping[str, Any]) -> Scheme:
    """Returns the scheme that leaves four-bit weights in their bits."""
    from quire.layers.quant.kept_bits import KINDS, KeptBits

    types = hf_config.get("tensor_types", {})
    if ops.native is not None:
        what = "quant=keep is for CUDA: on a CPU weights stay in their own bits without it."
        raise QuireError("invalid_parameter", what, "Leave it out.", param="quant")
    if not set(types.values()) & set(KINDS):
        what = "quant=keep would change nothing: this checkpoint has no matrices in four bits with scales for groups."
        raise QuireError("invalid_parameter", what, "Leave it out.", param="quant")
    return KeptBits(ops, types, device)


def _tensor_types(dtype: str, hf_config: Mapping[str, Any]) -> Mapping[str, str]:
    """Returns the checkpoint's tensor types, by name, if tensors may stay packed. On a CPU that is so unless a dtype
    was requested: blocks are smaller and faster than floats.
    """
    types: Mapping[str, str] = hf_config.get("tensor_types", {})
    return types if dtype == "auto" else {}


def _cache_dtype(kv_dtype: str, compute_dtype: torch.dtype, device: torch.device, ops: Ops) -> torch.dtype:
    if kv_dtype in CACHE_FORMS and device.type not in ("cpu", "cuda"):
        what = f"--kv-dtype {kv_dtype} needs a CPU or a CUDA device: there are no kernels for it on {device.type}."
        raise QuireError("invalid_parameter", what, "Leave it out.", param="kv_dtype")
    if kv_dtype == "auto" or kv_dtype in CACHE_FORMS:
        return compute_dtype
    _need_cuda("kv_dtype=fp8", device, ops)
    return torch.float8_e4m3fn


def _deterministic_ops(
    hf_config: Mapping[str, Any], device: torch.device, dtype: str, quant: str, kv_dtype: str, kernels: str
) -> Ops:
    model_type = find_model_type(hf_config)
    family = find_family(model_type)
    config = _read_config(family, {**hf_config, "model_type": model_type})
    return select_deterministic_ops(
        model_type,
        fits_native=_fits_native(family, config),
        device_type=device.type,
        dtype=dtype,
        quant=quant,
        in_blocks=_runs_natively(family, config, quant, dtype, hf_config),
        kernels=kernels,
        kv_dtype=kv_dtype,
    )


def _need_cuda(setting: str, device: torch.device, ops: Ops) -> None:
    if device.type != "cuda" or ops is REFERENCE:
        name = setting.split("=")[0]
        raise QuireError("invalid_parameter", f"{setting} needs a CUDA device and Triton.", "Leave it out.", param=name)


def generation_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the published sampling parameters; none if the model is published with `do_sample` false."""
    if generation_config.get("do_sample") is False:
        return {}
    return {key: generation_config[key] for key in _SAMPLING_KEYS if generation_config.get(key) is not None}


def read_eos_ids(
    generation_config: Mapping[str, Any], hf_config: Mapping[str, Any], vocab_size: int
) -> tuple[int, ...]:
    """Returns the end-of-sequence ids of generation_config.json, where chat models often list several, or else of
    config.json. An id outside the vocabulary is an error, since it would never end a sequence.
    """
    for name, config in (("generation_config.json", generation_config), ("config.json", hf_config)):
        given = config.get("eos_token_id")
        if given is None:
            continue
        ids = tuple(given) if isinstance(given, list) else (given,)
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                what = f"eos_token_id in {name} has {token!r}, which is not among the model's {vocab_size} tokens."
                raise QuireError("bad_config", what, f"Give a whole number below {vocab_size}, or a list of them.")
        return ids
    return ()


def _hf_config(files: ModelFiles, file: GGUFFile | None) -> dict[str, Any]:
    if file is not None:
        return gguf.read_config(file)
    config = dict(files.config or {})
    config = language_model_config(config) or config
    if config.get("quantization_config") and _has_weights(files):
        config["tensor_types"] = open_shards(files).types
    return config


def _has_weights(files: ModelFiles) -> bool:
    """Returns whether all shards are there; with random weights some may be missing."""
    try:
        return bool(list_shards(files.path))
    except QuireError:
        return False


def open_shards(files: ModelFiles) -> SafetensorsCheckpoint | LanguageModelCheckpoint:
    config = files.config or {}
    shards = SafetensorsCheckpoint(list_shards(files.path), str(files.path), read_quantization(config))
    return LanguageModelCheckpoint(shards) if language_model_config(config) is not None else shards


def _resolve_len(requested: int | None, max_positions: int) -> int:
    if requested is not None and requested > max_positions:
        what = f"max_model_len={requested} exceeds the model's maximum of {max_positions} positions."
        raise QuireError("invalid_parameter", what, "Lower it or leave it out.", param="max_model_len")
    return requested or max_positions


def _check_fits(num_bytes: int, device: torch.device, name: str, smaller: bool) -> int:
    free = available_memory(device)
    if num_bytes > free:
        what = (
            f"{name} needs {format_bytes(num_bytes)} for its weights, but only {format_bytes(free)} of memory is free."
        )
        other = "`--quant fp8`" if smaller else "a smaller dtype"
        raise QuireError("model_too_large", what, f"Use a smaller model or {other}, or free some memory.")
    return num_bytes
