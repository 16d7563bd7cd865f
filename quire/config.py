"""Every knob, as one frozen tree. Built once from defaults < TOML file < environment < flags, then only read.

Leaf names are unique over the whole tree, so that `[model] max_model_len` in TOML, `QUIRE_MAX_MODEL_LEN` in the
environment and `--max-model-len` on the command line are the same knob under the same name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def knob(default: Any, help: str, *, choices: tuple[str, ...] | None = None, low: float | None = None,
         high: float | None = None) -> Any:  # fmt: skip
    """A field with its help text and bounds; `None` as default means "decided at start, from the machine"."""
    return field(default=default, metadata={"help": help, "choices": choices, "low": low, "high": high})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model: str = knob("smollm2", "built-in name, hub id, model folder or GGUF file")
    revision: str | None = knob(None, "hub revision (branch, tag or commit)")
    hub_token: str | None = knob(None, "hub access token (also read from HF_TOKEN)")
    offline: bool = knob(False, "never touch the network; use what is already on disk")
    dtype: str = knob("auto", "weights and activations", choices=("auto", "float32", "bfloat16", "float16"))
    max_model_len: int | None = knob(None, "longest sequence, prompt and output together", low=1)
    chat_template: str | None = knob(None, "chat template: a file, or the Jinja text itself")
    random_weights: bool = knob(False, "made-up weights from config.json alone, for speed measurements")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    page_tokens: int = knob(16, "tokens a cache page holds", low=1, high=1024)
    cache_memory: int | None = knob(None, "bytes for the cache on the device", low=1)
    memory_fraction: float = knob(0.9, "share of the device's free memory the cache may take", low=0.01, high=1.0)
    num_pages: int | None = knob(None, "exact number of pages, instead of sizing by memory", low=2)
    host_memory: int | None = knob(None, "bytes of host memory for preempted requests", low=0)
    prefix_cache: bool = knob(True, "reuse the state of prompts that begin alike")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_rows: int | None = knob(None, "requests that may run at once", low=1, high=8192)
    max_batch_tokens: int | None = knob(None, "tokens one step may compute", low=1, high=1 << 20)
    chunk_tokens: int | None = knob(None, "most tokens of one prompt in one step", low=1, high=1 << 20)
    step_target_ms: float | None = knob(None, "keep steps this short by shrinking prompt chunks", low=0.1)
    order: str = knob("priority", "which waiting request goes first", choices=("fcfs", "priority", "deadline"))
    preemption: str = knob("auto", "what becomes of a victim's cache", choices=("auto", "swap", "recompute"))
    max_waiting: int = knob(16384, "requests that may wait", low=1)
    max_waiting_tokens: int = knob(64_000_000, "prompt tokens that may wait", low=1)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    device: str = knob("auto", "where to run", choices=("auto", "cpu", "cuda"))
    depth: int | None = knob(None, "steps in flight: 1 synchronous, 2 overlapped", low=1, high=16)
    threads: int | None = knob(None, "CPU threads for tensor work", low=1)
    trace: str | None = knob(None, "write a trace that Perfetto opens to this file")


@dataclass(frozen=True, slots=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
