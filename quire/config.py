"""Every setting as one frozen tree, built once from defaults < TOML file < environment < flags and never changed.

Leaf names are unique over the whole tree, so that `[model] max_model_len` in TOML, `QUIRE_MAX_MODEL_LEN` in the
environment and `--max-model-len` on the command line are one setting. `config_build` fills the tree and defines the
flags from the list of settings at the end of this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, get_args, get_type_hints


def knob(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
    unit: str | None = None,
    secret: bool = False,
) -> Any:
    """Returns a field with its help text and bounds. The default None means that the machine decides at start.

    `unit="bytes"` allows sizes such as 2GiB; "path" only affects the help. A secret is masked wherever settings are
    shown.
    """
    metadata = {"help": help, "choices": choices, "low": low, "high": high, "unit": unit, "secret": secret}
    return field(default=default, repr=not secret, metadata=metadata)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model and how it is loaded."""

    model: str = knob("smollm2", "built-in name, hub id, model folder or GGUF file")
    revision: str | None = knob(None, "hub revision (branch, tag or commit)")
    hub_token: str | None = knob(None, "hub access token (also read from HF_TOKEN)", secret=True)
    offline: bool = knob(False, "never touch the network; use what is already on disk")
    dtype: str = knob("auto", "weights and activations", choices=("auto", "float32", "bfloat16", "float16"))
    quant: str = knob(
        "none",
        "quantize the weights while loading (fp8: CUDA; q8_0, q4_0: CPU)",
        choices=("none", "fp8", "q8_0", "q4_0"),
    )
    max_model_len: int | None = knob(None, "longest sequence, prompt and output together", low=1)
    chat_template: str | None = knob(None, "chat template: a file, or the Jinja text itself")
    special_in_content: bool = knob(False, "control tokens spelled in a message become real ones instead of text")
    pooling: str | None = knob(
        None, "how embeddings are pooled, in place of the model's own files", choices=("mean", "last")
    )
    random_weights: bool = knob(False, "made-up weights from config.json alone, for speed measurements")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache."""

    page_tokens: int | None = knob(None, "tokens a cache page holds (GPU: 64, CPU: 16)", low=1, high=1024)
    cache_memory: int | None = knob(None, "bytes for the cache on the device", low=1, unit="bytes")
    memory_fraction: float = knob(0.9, "share of the device's free memory the cache may take", low=0.01, high=1.0)
    num_pages: int | None = knob(None, "exact number of pages of page_tokens each, instead of sizing by memory", low=2)
    num_slots: int | None = knob(None, "exact number of recurrent state slots, likewise", low=3)
    host_memory: int | None = knob(None, "bytes of host memory for preempted requests", low=0, unit="bytes")
    swap_checksums: bool | None = knob(None, "checksums of preempted requests' pages on the host (default: on a CPU)")
    kv_dtype: str = knob("auto", "what keys and values are kept in (fp8: CUDA)", choices=("auto", "fp8"))
    prefix_cache: bool = knob(True, "reuse the state of prompts that begin alike")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The scheduler's limits and policies."""

    max_rows: int | None = knob(None, "requests that may run at once", low=1, high=8192)
    max_batch_tokens: int | None = knob(None, "tokens one step may compute", low=1, high=1 << 20)
    chunk_tokens: int | None = knob(None, "most tokens of one prompt in one step", low=1, high=1 << 20)
    step_target_ms: float | None = knob(
        None, "keep steps this short by shrinking prompt chunks (0: do not; CPU: 250)", low=0
    )
    order: str = knob("priority", "which waiting request goes first", choices=("fcfs", "priority", "deadline"))
    preemption: str = knob("auto", "what becomes of a victim's cache", choices=("auto", "swap", "recompute"))
    max_waiting: int = knob(16384, "requests that may wait", low=1)
    max_waiting_tokens: int = knob(64_000_000, "prompt tokens that may wait", low=1)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The device and how the engine uses it."""

    device: str = knob("auto", "where to run", choices=("auto", "cpu", "cuda"))
    depth: int | None = knob(None, "steps in flight: 1 synchronous, 2 overlapped", low=1, high=16)
    threads: int | None = knob(None, "CPU threads for tensor work", low=1)
    deterministic: bool = knob(False, "same bits for a row whatever surrounds it, or a refusal")
    kernels: str = knob(
        "auto",
        "what computes: torch, triton or a library with it (GPU), an instruction set (CPU)",
        choices=("auto", "triton", "flash-attn", "flashinfer", "cudnn", "torch", "avx512", "avx2", "portable"),
    )
    strict_kernels: bool = knob(False, "refuse to start where a GPU or a kernel would have to be done without")
    graphs: bool = knob(True, "replay decode steps as CUDA graphs")
    trace: str | None = knob(None, "write a trace that Perfetto opens to this file", unit="path")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP server and its supervision of the engine process."""

    host: str = knob("127.0.0.1", "address to listen on; 0.0.0.0 opens it to the network, so set a key then")
    port: int = knob(8000, "port to listen on (0: any free one)", low=0, high=65535)
    api_key: str | None = knob(None, "key clients must send; several are separated by commas", secret=True)
    admin_key: str | None = knob(None, "key of the admin routes, which are closed without one", secret=True)
    share_prefixes: bool = knob(False, "let all keys share cached prompts; their timing then tells of each other")
    served_model_name: str | None = knob(None, "name clients call the model by; several are separated by commas")
    allowed_hosts: str | None = knob(
        None,
        "more names clients call the server by, separated by commas, or * "
        "(default: any; on a loopback address without keys this machine's)",
    )
    cors_origins: str | None = knob(None, "web origins that may call from a browser, separated by commas, or *")
    request_timeout: float = knob(600.0, "seconds a request may take before it is ended", low=0.1, high=86400)
    rate_requests: int | None = knob(None, "requests a minute for each key (none by default)", low=1)
    rate_tokens: int | None = knob(None, "prompt and output tokens a minute for each key (none by default)", low=1)
    max_connections: int = knob(
        4096, "connections open at a time; those without a request go first", low=1, high=1 << 20
    )
    max_body: int = knob(32 << 20, "largest request body", low=1024, high=1 << 30, unit="bytes")
    body_timeout: float = knob(300.0, "seconds a request's body may take", low=0.1, high=86400)
    min_body_rate: int = knob(1024, "bytes a second a body must bring after 20 s (0: any)", low=0, high=1 << 30)
    max_messages: int = knob(4096, "most messages in one conversation", low=1, high=1 << 20)
    max_tools: int = knob(128, "most tools in one request", low=1, high=4096)
    max_schema: int = knob(256 << 10, "largest schema or grammar", low=64, high=16 << 20, unit="bytes")
    max_samples: int = knob(128, "most samples of one request (n times the number of prompts)", low=1, high=4096)
    keep_alive: float = knob(10.0, "seconds of silence after which a stream gets a sign of life", low=0.05, high=3600)
    drain_timeout: float = knob(60.0, "seconds open requests get to finish after SIGTERM", low=0.0, high=86400)
    stall_timeout: float = knob(120.0, "seconds without a step or a token after which the engine is ill", low=2.0)
    hang_timeout: float = knob(120.0, "seconds without a step or a token after which the engine is replaced", low=2.0)
    start_timeout: float = knob(1800.0, "seconds the engine may take to load", low=1.0)
    max_restarts: int = knob(5, "times the engine is started again within restart_window", low=0, high=1000)
    restart_window: float = knob(60.0, "seconds over which restarts are counted", low=1.0)
    engine_memory: int | None = knob(
        None, "bytes the engine process may hold before it is replaced", low=1 << 20, unit="bytes"
    )
    out_of_memory: str = knob(
        "same", "the next engine after one ran out of memory", choices=("same", "shrink", "precision")
    )
    send_timeout: float = knob(60.0, "seconds a client may take to read what was sent before it is cut off", low=0.1)
    response_store: str | None = knob(None, "SQLite file of stored responses (default: gone at exit)", unit="path")
    max_stored: int = knob(10_000, "stored responses kept; the oldest go first", low=1, high=10_000_000)
    max_stored_bytes: int = knob(256 << 20, "bytes of them kept, likewise", low=1024, unit="bytes")
    tool_format: str | None = knob(None, "how the model writes tool calls (default: read from its chat template)")
    log_level: str = knob("info", "least severe log line shown", choices=("debug", "info", "warning", "error"))
    log_form: str = knob("text", "log lines for people or for machines", choices=("text", "json"))


@dataclass(frozen=True, slots=True)
class Config:
    """All settings."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    # Origin of each setting that is not at its default. It is only shown, so comparisons ignore it.
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)


# ---------------------------------------------------------------------------------------------------------------------
# The tree, as a list of its leaves


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting and its names: `table` and `name` in TOML, `variable` in the environment, `flag`."""

    table: str
    name: str
    kind: type  # bool, int, float or str
    optional: bool  # None is allowed
    default: Any
    help: str
    choices: tuple[str, ...] | None
    low: float | None
    high: float | None
    unit: str | None
    secret: bool

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return "QUIRE_" + self.name.upper()

    @property
    def flag(self) -> str:
        """Name of the command-line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def none_word(self) -> str | None:
        """The spelling of None: "auto" for a number, which is chosen at start, and "none" for a text."""
        return ("none" if self.kind is str else "auto") if self.optional else None

    def read(self, config: Config) -> Any:
        """Returns the setting's value."""
        return getattr(getattr(config, self.table), self.name)


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)


@cache
def tables() -> dict[str, type]:
    """Returns the groups of the tree by name, in order."""
    return {name: kind for name, kind in get_type_hints(Config).items() if _is_table(kind)}


@cache
def knobs() -> dict[str, Knob]:
    """Returns every setting by name, in the order of the tree."""
    found: dict[str, Knob] = {}
    for table, kind in tables().items():
        hints = get_type_hints(kind)
        for item in fields(kind):
            options = get_args(hints[item.name]) or (hints[item.name],)
            kinds = [option for option in options if option is not NoneType]
            if item.name in found or len(kinds) != 1:
                raise TypeError(f"{kind.__name__}.{item.name}: leaf names must be unique, and of one type or None")
            found[item.name] = Knob(table, item.name, kinds[0], NoneType in options, item.default, **item.metadata)
    return found
