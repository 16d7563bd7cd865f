"""Builds a running engine and its edge from a config. `early_init.open_engine` calls `assemble`.

This is the only module that imports every subsystem. `defaults` has the defaults that depend on the machine, and
`cache_plan` the sizes of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.cache.index import CacheIndex
from quire.cache.memory import MemoryPlan
from quire.config import Config
from quire.edge import Edge
from quire.engine.adapters.registry import AdapterHost, NoAdapters
from quire.engine.adapters.slots import AdapterSlots
from quire.engine.grammar.compile_queue import GrammarQueue
from quire.engine.grammar.matcher import GrammarCompiler, MaskFiller
from quire.engine.loop import Engine
from quire.engine.model_host import ModelControl
from quire.engine.scheduler import Scheduler
from quire.engine.speculation.build import make_drafter
from quire.engine.speculation.seam import Drafter
from quire.engine.trace import NO_TRACE, FileTracer
from quire.engine.workers import Workers
from quire.files.adapters import parse_adapters
from quire.files.progress import Progress, loading_progress
from quire.files.source import ModelFiles
from quire.kernels.table import (
    RowOps,
    SamplingOps,
    deterministic_ops,
    select_choice,
    select_ops,
    select_row_ops,
    select_sampling,
)
from quire.kernels.validation.self_test import check_ops
from quire.kernels.validation.trial_results import Findings
from quire.kernels.validation.trials import TOLERANCE
from quire.machine import read_machine
from quire.models.adapters.places import Places
from quire.models.loading.device_memory import available_memory
from quire.models.loading.loader import (
    load_model,
)
from quire.models.model import Model
from quire.runtime.adapters import DeviceAdapters
from quire.runtime.graphs import DecodeGraphs
from quire.runtime.guard import GuardedWorkers, enter_device, release_memory
from quire.runtime.mixed_graphs import MixedGraphs
from quire.runtime.proposals import Proposals
from quire.runtime.rejection import Rejection
from quire.runtime.row_trial import settle_row_ops
from quire.runtime.rows import DeviceRows
from quire.runtime.runner import Runner
from quire.runtime.store import CacheStore
from quire.runtime.verify_graphs import VerifyGraphs
from quire.sampling.fused import ALL_KERNELS, INEXACT_KERNELS
from quire.sampling.rows import SamplingRows
from quire.sampling.sampler import Sampler, TokenSampler
from quire.sampling.trial import settle_sampling
from quire.startup import Compilers
from quire.startup.cache_plan import allocate_cache, find_files, plan_model_memory
from quire.startup.defaults import describe_gpu, pick_device, resolve_limits, resolve_page_tokens
from quire.startup.draft_network import LoadedDraft, load_draft
from quire.startup.live_model import LiveModel
from quire.startup.rank_engine import start_ranks
from quire.startup.tiers import attach_stores, history_file, refuse_stores, weights_version
from quire.startup.trial_notes import TrialNote, find_note
from quire.text.loading import lazy_template, load_tokenizer
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts of a running engine that a front end uses."""

    engine: Engine
    edge: Edge
    memory: MemoryPlan
    files: ModelFiles
    dtype: str
    grammars: GrammarQueue | None  # queue of requests whose grammars compile; None: no tokenizer, so no grammars


def assemble(config: Config, progress: Progress | None = None, compilers: Compilers | None = None) -> Assembly:
    """Loads the model and returns its engine. `compilers`: processes that compile kernels, see `compile_ahead`."""
    device = pick_device(config.engine.device, strict=config.engine.strict_kernels)
    enter_device(device)
    if compilers is not None and device.type == "cuda":
        compilers.attach()
    if device.type == "cpu":
        torch.set_num_threads(config.engine.threads or read_machine().num_usable_cores)
        select = deterministic_ops if config.engine.deterministic else select_ops
        check_ops(select("cpu", config.engine.kernels), device)
    files = find_files(config, progress)
    tokenizer = load_tokenizer(files)
    template = lazy_template(tokenizer, config.model.chat_template)
    running = _run_ranks(config, device)
    if running is None:
        note = find_note(config, files, describe_gpu(device))
        running = _load_engine(config, files, tokenizer, device, note, progress or loading_progress())
    engine, memory = running.engine, running.memory
    eos_ids = tuple(dict.fromkeys([*running.eos_ids, *(tokenizer.eos_ids if tokenizer else ())]))
    edge = Edge(
        tokenizer=tokenizer,
        template=template,
        vocab_size=running.vocab_size,
        max_len=memory.capacity_tokens,
        eos_ids=eos_ids,
        defaults=running.defaults,
        clock=engine.scheduler.clock,
        special_in_content=config.model.special_in_content,
        tool_format=config.server.tool_format,
    )
    for name, path in parse_adapters(config.adapters.adapter).items():
        engine.adapters.load(edge.adapters, name, path)
    grammars = _grammar_queue(tokenizer, eos_ids, running.vocab_size)
    return Assembly(engine, edge, memory, files, running.dtype, grammars)


@dataclass(frozen=True, slots=True)
class RunningModel:
    """An engine, and what a front end has to know of its model."""

    engine: Engine
    memory: MemoryPlan
    vocab_size: int
    eos_ids: tuple[int, ...]
    defaults: dict[str, Any]
    dtype: str


def _run_ranks(config: Config, device: torch.device) -> RunningModel | None:
    """Returns the engine of a group of ranks; None: the model runs in this process."""
    if config.parallel.tp == config.parallel.pp == config.parallel.ep == 1:
        return None
    refuse_stores(config, "A group of ranks")
    ranks = start_ranks(config)
    replays = any(spec.kind == "state" for spec in ranks.memory.specs)
    loaded, drafter = ranks.loaded, make_drafter(config.engine.speculate, replays=replays)
    engine = engine_of(ranks.workers, ranks.memory, config, device, drafter)
    eos_ids = tuple(loaded.eos_ids)
    return RunningModel(engine, ranks.memory, loaded.vocab_size, eos_ids, loaded.defaults, loaded.dtype)


def _load_engine(
    config: Config,
    files: ModelFiles,
    tokenizer: Tokenizer | None,
    device: torch.device,
    note: TrialNote | None,
    progress: Progress,
) -> RunningModel:
    """Returns the engine of a model that runs in this process.

    If an earlier start left a note, its kernels are used without trials, provided that the engine's first warm-up runs:
    a kernel may have been damaged on disk since. If that fails, the note is deleted and the model is loaded again with
    trials.
    """
    noted = note.read() if note is not None else None
    if note is not None and noted is not None:
        found = _load_with(Findings(noted), config, files, tokenizer, device, note, progress)
        if note.read() is not None:
            return found
        found.engine.close()
        del found
        release_memory(device)
    findings = Findings()
    found = _load_with(findings, config, files, tokenizer, device, note, progress)
    if note is not None and (decided := findings.worth_noting) is not None:
        note.write(decided)
    return found


def _load_with(
    findings: Findings,
    config: Config,
    files: ModelFiles,
    tokenizer: Tokenizer | None,
    device: torch.device,
    note: TrialNote | None,
    progress: Progress,
) -> RunningModel:
    def forbid_note() -> None:
        findings.forbid_note()
        if note is not None:
            note.delete()

    loaded = load_model(
        files,
        dtype=config.model.dtype,
        device=device,
        max_model_len=config.model.max_model_len,
        page_tokens=resolve_page_tokens(config, device),
        random_weights=config.model.random_weights,
        quant=config.model.quant,
        kv_dtype=config.cache.kv_dtype,
        kv_skip=config.cache.kv_dtype_skip,
        deterministic=config.engine.deterministic,
        kernels=config.engine.kernels,
        strict_kernels=config.engine.strict_kernels,
        findings=findings,
        progress=progress,
    )
    draft = load_draft(config, files, loaded, tokenizer, device, progress)
    release_memory(device)  # frees weights that were quantized after reading, before the plan reads the free memory
    engine, memory = build_model_engine(
        loaded.model,
        config,
        loaded.max_model_len,
        device,
        weights=loaded.weights_bytes + (draft.weights_bytes if draft is not None else 0),
        findings=findings,
        on_failure=forbid_note,
        draft=draft,
        version=weights_version(config, files),
        places=loaded.places,
    )
    workers = engine.workers
    if isinstance(workers, GuardedWorkers) and isinstance(workers.inner, Runner):
        encode = None if tokenizer is None else tokenizer.encode
        host = LiveModel(config, files, loaded, workers.inner, device, build_model_engine, encode)
        ModelControl(engine, host)
    engine.run_warm_up()  # for one request, so that the first one meets neither a compiler nor a broken kernel
    if loaded.model.ops.native is not None:
        torch.set_num_threads(1)  # the native thread pool uses the cores; torch only runs small operations
    model = loaded.model
    return RunningModel(engine, memory, model.vocab_size, loaded.eos_ids, loaded.generation_defaults, loaded.dtype)


def lower_precision(config: Config, parts: Assembly) -> dict[str, str]:
    """Returns the settings of an engine with smaller weights or cache, for a restart after running out of memory.

    Empty if there is no lower precision, or if the deterministic mode forbids it.
    """
    if parts.memory.device != "cpu":
        return {"kv_dtype": "fp8"} if config.cache.kv_dtype == "auto" and not config.engine.deterministic else {}
    keeps_blocks = parts.files.kind == "gguf" and config.model.dtype == "auto"  # smaller than floats
    if config.engine.deterministic or config.model.quant != "none" or keeps_blocks:
        return {}
    return {"dtype": "float16"} if config.model.dtype in ("auto", "float32") else {}


def build_model_engine(
    model: Model,
    config: Config,
    max_model_len: int,
    device: torch.device,
    *,
    weights: int = 0,
    findings: Findings | None = None,
    on_failure: Callable[[], None] | None = None,
    drafter: Drafter | None = None,
    draft: LoadedDraft | None = None,
    version: bytes = b"",
    places: Places | None = None,
) -> tuple[Engine, MemoryPlan]:
    """Returns the engine of a loaded model. `on_failure`: called when a step fails, see `GuardedWorkers`. `drafter`:
    None for that of the config. `draft`: the draft network, if there is one. `version`: of the weights, by which stores
    keep the cache. `places`: the weights that adapters can change; None: there are no adapters."""
    runner, memory = build_runner(
        model, config, max_model_len, device, weights=weights, findings=findings, draft=draft, places=places
    )
    workers = GuardedWorkers(runner, device, on_failure=on_failure)
    if drafter is None:
        name = draft.name if draft is not None else None
        replays = any(spec.kind == "state" for spec in model.specs)
        file = history_file(config, version, model.vocab_size)
        drafter = make_drafter(config.engine.speculate, name, config.engine.verify, replays=replays, file=file)
    engine = engine_of(workers, memory, config, device, drafter, version, runner.adapters)
    attach_stores(engine.scheduler.cache, runner.store, config)
    engine.sessions.adopt()
    return engine, memory


def engine_of(
    workers: Workers,
    memory: MemoryPlan,
    config: Config,
    device: torch.device,
    drafter: Drafter | None = None,
    version: bytes = b"",
    adapters: AdapterHost | None = None,
) -> Engine:
    """Returns an engine whose steps these workers run, and whose cache has the planned size."""
    host = list(memory.num_host_units) if memory.num_host_units else None
    cache = CacheIndex(
        list(memory.specs),
        list(memory.num_units),
        host,
        prefix_cache=config.cache.prefix_cache,
        host_cache=config.cache.host_cache,
        weights=version,
    )
    tracer = FileTracer(config.engine.trace) if config.engine.trace else NO_TRACE
    limits = resolve_limits(config, device)
    slots = AdapterSlots(0 if adapters is None else config.adapters.adapter_slots)
    scheduler = Scheduler(cache, limits, drafter=drafter, adapters=slots)
    if config.cache.evict == "cost":
        cache.evict_by_cost(scheduler.costs.prompt_seconds)
    keeper = adapters or NoAdapters(_why_no_adapters(config))
    return Engine(scheduler, workers, depth=limits.depth, tracer=tracer, fill_masks=MaskFiller(), adapters=keeper)


def _why_no_adapters(config: Config) -> str:
    if max(config.parallel.tp, config.parallel.pp, config.parallel.ep) > 1:
        return "Adapters need a model that one rank computes alone."
    if config.engine.deterministic:
        return "Adapters have no deterministic products yet."
    return "This engine has no slots for adapters (--adapter-slots)."


def build_runner(
    model: Model,
    config: Config,
    max_model_len: int,
    device: torch.device,
    *,
    weights: int = 0,
    findings: Findings | None = None,
    draft: LoadedDraft | None = None,
    share_samples: Callable[[Sampler], TokenSampler] | None = None,
    incoming: Callable[[], Tensor | None] = lambda: None,
    agree: Callable[[MemoryPlan], MemoryPlan] = lambda memory: memory,
    num_ranks: int = 1,
    places: Places | None = None,
) -> tuple[Runner, MemoryPlan]:
    """Returns what executes plans on this device, and the plan of its memory.

    For one of `num_ranks` ranks that share the device's memory: `share_samples` wraps the sampler, so that all ranks of
    a group get the same tokens, `incoming` has the stream of the pipeline stage before this one, and `agree` changes
    the memory plan to that of the group.
    """
    limits = resolve_limits(config, device)
    network = draft.network if draft is not None else None
    available = available_memory(device) // num_ranks
    memory = agree(plan_model_memory(model, config, limits, device, available, weights, max_model_len, network))
    checksums = config.cache.swap_checksums
    store, memory = allocate_cache(memory, device, device.type == "cpu" if checksums is None else checksums)
    draft_specs = network.specs if network is not None else []
    rows = DeviceRows(limits.max_rows, max_model_len, list(model.specs), device, draft_specs)
    sampling_ops = try_sampling_ops(model, config, device, device, findings)
    # Captured steps use the sampler's kernels, so they are impossible without these.
    row_ops = None if sampling_ops is None else try_row_ops(model, config, max_model_len, device, device, findings)
    graphs = DecodeGraphs(model, store.tensors, rows, row_ops, limits.max_rows) if row_ops is not None else None
    mixed = _mixed_graphs(model, store, rows, row_ops, graphs, limits.max_rows)
    verify = None
    if config.engine.speculate != "off":
        verify = _verify_graphs(model, store, rows, graphs, limits.max_rows)
    sampling = SamplingRows(limits.max_rows, model.vocab_size, device)
    choice = select_choice(device.type, config.engine.kernels)
    sampler = Sampler(model.vocab_size, device, sampling_ops, choice, _required_kernels(config))
    by_rejection = config.engine.verify == "rejection"
    proposals = None
    if network is not None:
        proposals = Proposals(network, store.tensors, rows, sampling, sampler, keeps_distributions=by_rejection)
    shared: TokenSampler = sampler if share_samples is None else share_samples(sampler)
    runner = Runner(
        model,
        store,
        rows,
        sampling,
        shared,
        graphs,
        mixed,
        verify,
        proposals=proposals,
        rejection=Rejection(sampler, proposals) if by_rejection else None,
        adapters=_device_adapters(model, places, config, limits.max_rows, device),
        incoming=incoming,
        max_batch_tokens=limits.max_batch_tokens,
    )
    return runner, memory


def _device_adapters(
    model: Model, places: Places | None, config: Config, num_rows: int, device: torch.device
) -> DeviceAdapters | None:
    slots = config.adapters.adapter_slots
    if places is None or not slots or config.engine.deterministic or config.parallel.tp > 1:
        return None
    dtype = torch.float32 if device.type == "cpu" else _logits_dtype(model)
    return DeviceAdapters(model, places, slots, num_rows, device, dtype, config.adapters.max_adapter_rank)


def _grammar_queue(tokenizer: Tokenizer | None, eos_ids: tuple[int, ...], vocab_size: int) -> GrammarQueue | None:
    if tokenizer is None:
        return None

    def make_compiler() -> GrammarCompiler:
        ids = range(min(tokenizer.vocab_size, vocab_size))  # some tokenizers have more tokens than their model
        tokens = [tokenizer.token_bytes(i) for i in ids]
        special = [i for i in ids if tokenizer.is_special(i)]
        return GrammarCompiler(
            tokens, eos_ids, special_ids=special, vocab_size=vocab_size, encode=tokenizer.encode_inside
        )

    return GrammarQueue(make_compiler)


def _can_capture(model: Model) -> bool:
    return not model.is_eager_only() and model.ops.captures


def try_sampling_ops(
    model: Model, config: Config, device: torch.device, at: torch.device, findings: Findings | None = None
) -> SamplingOps | None:
    """Returns the device's sampling kernels after their trial; None if torch samples.

    The deterministic mode never falls back to torch, whose random bits differ. `at`: see `build_tried_model`.
    """
    engine = config.engine
    ops = None if engine.kernels == "torch" else select_sampling(device.type, engine.deterministic)
    if ops is None:
        return None
    strict = engine.strict_kernels or engine.deterministic
    return settle_sampling(ops, model.vocab_size, _logits_dtype(model), at, strict=strict, findings=findings)


def _required_kernels(config: Config) -> frozenset[str]:
    """Returns the sampling kernels that torch must not replace."""
    if config.engine.strict_kernels:
        return ALL_KERNELS
    return INEXACT_KERNELS if config.engine.deterministic else frozenset()


def try_row_ops(
    model: Model,
    config: Config,
    max_model_len: int,
    device: torch.device,
    at: torch.device,
    findings: Findings | None = None,
) -> RowOps | None:
    """Returns the tried kernels that captured steps need besides the model's; None: steps run uncaptured."""
    ops = select_row_ops(device.type) if config.engine.graphs and _can_capture(model) else None
    if ops is None:
        return None
    return settle_row_ops(
        ops,
        list(model.specs),
        max_model_len,
        model.vocab_size,
        _logits_dtype(model),
        at,
        strict=config.engine.strict_kernels,
        findings=findings,
    )


def _logits_dtype(model: Model) -> torch.dtype:
    """Returns the dtype of the model's computation; stored weights may have a smaller type."""
    weights = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return next((weight.dtype for weight in weights if weight.dtype in TOLERANCE), torch.float32)


def _verify_graphs(
    model: Model, store: CacheStore, rows: DeviceRows, graphs: DecodeGraphs | None, max_rows: int
) -> VerifyGraphs | None:
    """Returns graphs of steps with drafts; None unless decodes are captured and all state is paged."""
    if graphs is None or any(spec.kind != "paged" for spec in model.specs) or model.captures_decodes_only():
        return None
    return VerifyGraphs(model, store.tensors, rows, max_rows, graphs.pool, graphs.stream)


def _mixed_graphs(
    model: Model,
    store: CacheStore,
    rows: DeviceRows,
    row_ops: RowOps | None,
    graphs: DecodeGraphs | None,
    max_rows: int,
) -> MixedGraphs | None:
    """Returns graphs of steps with prefill and decode rows; None unless decodes are captured and all state is paged."""
    if row_ops is None or graphs is None or any(spec.kind != "paged" for spec in model.specs):
        return None
    captured_work = model.ops.captured_work
    if captured_work is None or model.captures_decodes_only():
        return None
    return MixedGraphs(model, store.tensors, rows, row_ops, captured_work, max_rows, graphs.pool, graphs.stream)
