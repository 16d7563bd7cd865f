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
    """Returns a field with its help text and bounds. The default None means that the machine decides at start. A choice
    that ends in ":N" stands for all numbers in the place of N.

    `unit="bytes"` allows sizes such as 2GiB; "list" joins the values of a repeated flag; "path" only affects the help.
    A secret is masked wherever settings are shown.
    """
    metadata = {"help": help, "choices": choices, "low": low, "high": high, "unit": unit, "secret": secret}
    return field(default=default, repr=not secret, metadata=metadata)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model and how it is loaded."""

    model: str = knob("smollm2", "built-in model, hub id, model folder or GGUF file")
    revision: str | None = knob(None, "hub revision (branch, tag or commit)")
    hub_token: str | None = knob(None, "hub access token (also read from HF_TOKEN)", secret=True)
    offline: bool = knob(False, "use only files on disk, without network access")
    dtype: str = knob(
        "auto", "data type of weights and activations", choices=("auto", "float32", "bfloat16", "float16")
    )
    quant: str = knob(
        "none",
        "quantize the weights while loading (fp8: CUDA; q8_0, q4_0, int8: CPU); keep: "
        "leave 4-bit weights in their bits on CUDA",
        choices=("none", "fp8", "q8_0", "q4_0", "int8", "keep"),
    )
    max_model_len: int | None = knob(None, "maximum tokens of a sequence, prompt and output together", low=1)
    chat_template: str | None = knob(None, "chat template, as a file or as Jinja text")
    special_in_content: bool = knob(
        False, "encode the spelling of control tokens in messages as control tokens, not as text"
    )
    pooling: str | None = knob(
        None, "pooling of embeddings, overriding the rule in the model's files", choices=("mean", "last")
    )
    random_weights: bool = knob(False, "random weights from config.json alone, for speed measurements")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """LoRA adapters, which requests choose by name."""

    adapter: str | None = knob(
        None, "LoRA adapter to load at start, as name=path; may be repeated, or name several by commas", unit="list"
    )
    adapter_slots: int = knob(8, "adapters on the device at once; others wait in host memory", low=0, high=1024)
    max_adapter_rank: int = knob(64, "largest rank of an adapter", low=1, high=4096)
    adapter_dir: str | None = knob(
        None, "folder from which clients with the admin key may load adapters (default: none)", unit="path"
    )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache."""

    page_tokens: int | None = knob(
        None, "tokens per KV cache page (default: 64 on a GPU, 16 on a CPU)", low=1, high=1024
    )
    cache_memory: int | None = knob(None, "memory of the KV cache on the device", low=1, unit="bytes")
    memory_fraction: float = knob(0.9, "fraction of the device's free memory for the KV cache", low=0.01, high=1.0)
    num_pages: int | None = knob(None, "number of KV cache pages, overriding the size by memory", low=2)
    num_slots: int | None = knob(None, "number of recurrent state slots, overriding the size by memory", low=3)
    host_memory: int | None = knob(None, "host memory for preempted requests and evicted KV cache", low=0, unit="bytes")
    host_cache: bool = knob(True, "keep KV cache evicted from the device in host memory")
    cache_dir: str | None = knob(None, "folder that keeps the KV cache across restarts (default: none)", unit="path")
    cache_dir_size: int = knob(
        16 << 30, "maximum size of the folder that keeps the KV cache", low=1 << 20, unit="bytes"
    )
    shared_cache: str | None = knob(
        None, "folder or object store (s3://bucket/prefix) in which several engines share KV cache (default: none)"
    )
    swap_checksums: bool | None = knob(
        None, "checksum the pages of preempted requests in host memory (default: only on a CPU)"
    )
    kv_dtype: str = knob(
        "auto",
        "data type of the KV cache: fp8 (CUDA); int8, k8v4 (keys in 8 bits, values in 4) or q4",
        choices=("auto", "fp8", "int8", "k8v4", "q4"),
    )
    kv_dtype_skip: str | None = knob(
        None, "layers whose keys and values stay whole under int8, k8v4 and q4, such as 0,28-29"
    )
    evict: str = knob(
        "lru",
        "what the KV cache on the device evicts first: the least recently used, or what is computed again fastest per "
        "byte",
        choices=("lru", "cost"),
    )
    prefix_cache: bool = knob(True, "reuse the KV cache of equal prompt prefixes")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The scheduler's limits and policies."""

    max_rows: int | None = knob(None, "maximum requests that run at once", low=1, high=8192)
    max_batch_tokens: int | None = knob(None, "maximum tokens per step", low=1, high=1 << 20)
    chunk_tokens: int | None = knob(None, "maximum prefill tokens of one request per step", low=1, high=1 << 20)
    step_target_ms: float | None = knob(
        None, "shrink prefill chunks to keep steps this short (0: off; default: 250 on a CPU, 0 on a GPU)", low=0
    )
    order: str = knob(
        "priority", "order in which waiting requests are admitted", choices=("fcfs", "priority", "deadline")
    )
    admit: str = knob(
        "order",
        "which waiting request is next: the first in order, or of the first 16 the one with the largest cached prefix",
        choices=("order", "prefix"),
    )
    prefix_wait: float = knob(
        2.0, "with admit=prefix, seconds after which the first waiting request is next", low=0, high=3600
    )
    preemption: str = knob(
        "auto", "what to do with the KV cache of a preempted request", choices=("auto", "swap", "recompute")
    )
    max_waiting: int = knob(16384, "maximum requests in the queue", low=1)
    max_waiting_tokens: int = knob(64_000_000, "maximum prompt tokens in the queue", low=1)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The device and how the engine uses it."""

    device: str = knob(
        "auto",
        "device to run on: a number names one of several GPUs, mps is Apple's GPU; auto is the first of cuda, mps, cpu",
        choices=("auto", "cpu", "cuda", "cuda:N", "mps"),
    )
    depth: int | None = knob(None, "steps in flight: 1 synchronous, 2 overlapped", low=1, high=16)
    threads: int | None = knob(None, "CPU threads for tensor work", low=1)
    deterministic: bool = knob(
        False, "results that do not depend on the batch, bit for bit; refuse models that lack this"
    )
    kernels: str = knob(
        "auto",
        "kernels to use: torch; on a GPU triton, or a library beside it; on a CPU an instruction set",
        choices=(
            "auto",
            "triton",
            "flash-attn",
            "flashinfer",
            "cudnn",
            "torch",
            "avx512",
            "avx2",
            "i8mm",
            "dotprod",
            "portable",
        ),
    )
    strict_kernels: bool = knob(False, "refuse to start if the GPU or a kernel is unusable, instead of falling back")
    speculate: str = knob(
        "auto", "proposers of drafts, which steps verify without changing a token: auto; off; suffix,mtp; draft:MODEL"
    )
    verify: str = knob(
        "exact",
        "how drafts are verified. exact: every token is the one without drafts; rejection: tokens have the same "
        "distribution, and drafts that a draft network samples are accepted more often",
        choices=("exact", "rejection"),
    )
    graphs: bool = knob(True, "replay decode steps as CUDA graphs")
    trace: str | None = knob(None, "write a trace in Perfetto's format to this file", unit="path")


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How a model is shared out over several ranks."""

    tp: int = knob(1, "tensor-parallel ranks: processes that share every layer", low=1, high=64)
    pp: int = knob(1, "pipeline stages: processes that each have some of the layers", low=1, high=64)
    ep: int = knob(1, "ranks that have whole experts; they share the other parts of every layer", low=1, high=64)
    topology: str | None = knob(
        None, "machines that have a pipeline stage each, in TOML; the others run quire node", unit="path"
    )
    spare_rank: bool = knob(
        True, "keep a process that has imported torch, which replaces a lost rank sooner (some 200 MiB)"
    )
    rank_timeout: float = knob(30.0, "seconds after which a rank that does not answer counts as lost", low=0.1)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP server and its supervision of the engine process."""

    host: str = knob("127.0.0.1", "address to listen on; 0.0.0.0 is reachable from the network, so set an API key")
    uds: str | None = knob(None, "Unix socket to listen on instead of an address", unit="path")
    root_path: str | None = knob(None, "path below which a proxy shows this server, such as /llm")
    tls_cert: str | None = knob(None, "TLS certificate chain (PEM) of the server", unit="path")
    tls_key: str | None = knob(None, "private key of the TLS certificate (default: in the same file)", unit="path")
    port: int = knob(8000, "port to listen on (0: any free port)", low=0, high=65535)
    api_key: str | None = knob(None, "API key that clients must send; separate several by commas", secret=True)
    admin_key: str | None = knob(None, "key of the admin routes, which are disabled without it", secret=True)
    share_prefixes: bool = knob(
        False, "share cached prefixes between API keys, whose timing then reveals each other's prompts"
    )
    served_model_name: str | None = knob(None, "model name in the API; separate several by commas")
    allowed_hosts: str | None = knob(
        None,
        "additional host names of the server, separated by commas, or * "
        "(default: any name; on a loopback address without keys only this machine's)",
    )
    cors_origins: str | None = knob(None, "web origins allowed to call from a browser, separated by commas, or *")
    request_timeout: float = knob(600.0, "maximum seconds of a request", low=0.1, high=86400)
    rate_requests: int | None = knob(None, "maximum requests per minute and key (default: no limit)", low=1)
    rate_tokens: int | None = knob(
        None, "maximum prompt and output tokens per minute and key (default: no limit)", low=1
    )
    max_connections: int = knob(4096, "maximum open connections; idle ones are closed first", low=1, high=1 << 20)
    max_body: int = knob(32 << 20, "maximum size of a request body", low=1024, high=1 << 30, unit="bytes")
    body_timeout: float = knob(300.0, "maximum seconds to receive a request body", low=0.1, high=86400)
    min_body_rate: int = knob(
        1024, "minimum bytes per second of a request body after 20 s (0: no minimum)", low=0, high=1 << 30
    )
    lenient: bool = knob(False, "ignore unknown fields of request bodies instead of refusing them")
    max_messages: int = knob(4096, "maximum messages in a conversation", low=1, high=1 << 20)
    max_tools: int = knob(128, "maximum tools in a request", low=1, high=4096)
    max_schema: int = knob(256 << 10, "maximum size of a schema or grammar", low=64, high=16 << 20, unit="bytes")
    max_samples: int = knob(128, "maximum samples of a request (n times the number of prompts)", low=1, high=4096)
    keep_alive: float = knob(
        10.0, "seconds without output after which a stream gets a keep-alive message", low=0.05, high=3600
    )
    resume_seconds: float = knob(
        300.0, "maximum seconds for which a client can resume a dropped stream (0: never)", low=0.0, high=86400
    )
    drain_timeout: float = knob(60.0, "seconds that open requests have to finish after SIGTERM", low=0.0, high=86400)
    stall_timeout: float = knob(
        120.0, "seconds without a step or a token after which the engine is reported unhealthy", low=2.0
    )
    hang_timeout: float = knob(120.0, "seconds without a step or a token after which the engine is replaced", low=2.0)
    start_timeout: float = knob(1800.0, "maximum seconds to load the engine", low=1.0)
    max_restarts: int = knob(5, "maximum restarts of the engine within restart_window", low=0, high=1000)
    restart_window: float = knob(60.0, "seconds in which restarts are counted", low=1.0)
    engine_memory: int | None = knob(
        None, "memory of the engine process above which it is replaced", low=1 << 20, unit="bytes"
    )
    out_of_memory: str = knob(
        "same", "settings of the next engine after one ran out of memory", choices=("same", "shrink", "precision")
    )
    send_timeout: float = knob(
        60.0, "maximum seconds for a client to read sent data before it is disconnected", low=0.1
    )
    response_store: str | None = knob(
        None, "SQLite file of stored responses (default: not kept after exit)", unit="path"
    )
    max_stored: int = knob(10_000, "maximum stored responses; the oldest are deleted first", low=1, high=10_000_000)
    max_stored_bytes: int = knob(
        256 << 20, "maximum size of stored responses; the oldest are deleted first", low=1024, unit="bytes"
    )
    batch_store: str | None = knob(
        None, "SQLite file of batches and their files (default: not kept after exit)", unit="path"
    )
    max_batch_bytes: int = knob(1 << 30, "maximum size of all files of batches", low=1024, unit="bytes")
    otel_endpoint: str | None = knob(
        None, "OpenTelemetry collector to send traces to by OTLP/HTTP, such as http://localhost:4318"
    )
    metric_names: str = knob(
        "quire", "names in /metrics; vllm adds vLLM's, for tools that ask for those", choices=("quire", "vllm")
    )
    tool_format: str | None = knob(None, "format of the model's tool calls (default: detected from its chat template)")
    log_level: str = knob("info", "minimum severity of log lines", choices=("debug", "info", "warning", "error"))
    log_form: str = knob("text", "format of log lines", choices=("text", "json"))


@dataclass(frozen=True, slots=True)
class Config:
    """All settings."""

    model: ModelConfig = field(default_factory=ModelConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
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
