"""Plans how much memory a model's cache takes on this machine, and allocates the cache."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch

from quire.cache.memory import MemoryPlan, plan_memory, shrink_cache
from quire.config import Config
from quire.engine.limits import SchedulerLimits
from quire.files.progress import Progress
from quire.files.source import ModelFiles, resolve_model
from quire.kernels.table import select_ops
from quire.layers.weights import weights_bytes
from quire.models.drafting import DraftNetwork
from quire.models.fallback.model import FallbackModel
from quire.models.loading.device_memory import available_memory
from quire.models.loading.loader import build_model, keeps_blocks, list_notes, read_config, resolve_dtype, supports_fp8
from quire.models.model import Model
from quire.runtime.guard import release_memory
from quire.runtime.store import CacheStore
from quire.startup.defaults import pick_device, resolve_limits, resolve_page_tokens
from quire.startup.draft_network import build_draft
from quire.types import is_out_of_memory

SHRINK = 0.9  # factor of the number of pages after each failed allocation


def memory_report(config: Config) -> MemoryPlan:
    """Returns the memory plan of a model from its files, without loading its weights. `quire doctor` prints it."""
    device = pick_device(config.engine.device)
    files = find_files(config, None)
    hf_config = read_config(files)
    model, _ = build_model(
        hf_config,
        dtype=config.model.dtype,
        device=device,
        page_tokens=resolve_page_tokens(config, device),
        quant=config.model.quant,
        kv_dtype=config.cache.kv_dtype,
        kv_skip=config.cache.kv_dtype_skip,
        ops=select_ops(device.type, config.engine.kernels),
    )
    limits = resolve_limits(config, device)
    max_model_len = config.model.max_model_len or model.max_positions
    draft = build_draft(config, files, model, device)
    network = draft.network if draft is not None else None
    weights = weights_bytes(model) + (draft.weights_bytes if draft is not None else 0)
    available = available_memory(device) - weights
    plan = plan_model_memory(model, config, limits, device, available, weights, max_model_len, network)
    dtype = resolve_dtype(config.model.dtype, device, hf_config)
    quant = config.model.quant
    smaller = quant == "none" and supports_fp8(model, device, config.engine.kernels, config.engine.deterministic)
    in_blocks = keeps_blocks(model, config.model.dtype, hf_config)
    return replace(plan, notes=(*plan.notes, *list_notes(model, files, hf_config, dtype, quant, smaller, in_blocks)))


def plan_cache(
    model: Any, config: Config, limits: SchedulerLimits, device: torch.device, available: int, max_model_len: int
) -> MemoryPlan:
    """Returns the memory plan of a model that is not loaded yet, with so many bytes available now."""
    weights = weights_bytes(model)
    return plan_model_memory(model, config, limits, device, available - weights, weights, max_model_len)


def plan_model_memory(
    model: Model,
    config: Config,
    limits: SchedulerLimits,
    device: torch.device,
    available: int,
    weights: int,
    max_model_len: int,
    network: DraftNetwork | None = None,
) -> MemoryPlan:
    """Returns the memory plan of a model and its draft network, with so many bytes available now."""
    width = model.activation_elements * limits.max_batch_tokens
    specs = list(model.specs)
    if network is not None:  # the two run one after the other
        width = max(width, network.activation_elements * limits.max_batch_tokens)
        specs += network.specs
    logits = 4 * limits.max_rows * model.vocab_size  # raw, processed, probabilities, and sort buffers
    item = 4 if device.type == "cpu" else 2
    work = model.work_bytes(limits.max_rows) if isinstance(model, FallbackModel) else 0
    return plan_memory(
        specs,
        config.cache,
        device=device.type,
        available=available,
        host_available=available_memory(torch.device("cpu")),
        weights=weights,
        activations=width * item + logits * 4 + work,
        max_rows=limits.max_rows,
        max_model_len=max_model_len,
        max_batch_tokens=limits.max_batch_tokens,
    )


def allocate_cache(memory: MemoryPlan, device: torch.device, checksums: bool = True) -> tuple[CacheStore, MemoryPlan]:
    """Allocates the planned cache. Returns it with the plan it follows.

    If the allocation fails (fragmented memory, or another process took some since the plan), a smaller cache is tried,
    and the plan's notes say so.
    """
    wanted = memory
    while True:
        host = list(memory.num_host_units) if memory.num_host_units else None
        try:
            store = CacheStore(list(memory.specs), list(memory.num_units), host, device, checksums=checksums)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        else:
            if memory is not wanted:
                warnings.warn(f"The cache was made smaller: {memory.notes[-1]}.", stacklevel=2)
            return store, memory
        release_memory(device)
        memory = shrink_cache(memory, wanted, SHRINK)


def find_files(config: Config, progress: Progress | None) -> ModelFiles:
    """Returns the model's files, downloading them if needed."""
    model = config.model
    return resolve_model(
        model.model,
        revision=model.revision,
        token=model.hub_token,
        offline=model.offline,
        random_weights=model.random_weights,
        progress=progress,
    )
