"""The settings of a chaos run, and the flags of the server that it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.bench.hostile.requests import costly_template
from quire.chaos.kinds import KINDS
from quire.text.template import template_source
from quire.text.tokenizer import Tokenizer

ADMIN_KEY = "chaos"
CACHE = "cache"  # folder of the KV cache, below that of the run


@dataclass(frozen=True, slots=True)
class ChaosSettings:
    model: str = "smollm2"  # `tiny`: a generated model
    seconds: float = 60.0
    streams: int = 8
    seed: int = 0
    deterministic: bool = False
    max_tokens: int = 48
    num_scripts: int = 32
    faults: int | None = None  # None: one every few seconds
    hang_timeout: float = 20.0
    threads: int | None = None
    kernels: str = "auto"
    kinds: tuple[str, ...] = KINDS
    hostile: float = 0.1  # share of requests that are hostile
    tp: int = 1
    pp: int = 1
    speculate: str | None = None  # proposers of drafts; None: the server's default

    @property
    def num_pages(self) -> int:
        """Pages of the server: so few that requests preempt each other and swap space is used."""
        return 24 * min(32, self.streams)


def server_flags(settings: ChaosSettings, model: str, tokenizer: Tokenizer, folder: Path) -> list[str]:
    """Return the flags of `quire.chaos.server_process`, which are those of `quire serve`."""
    values = {
        "--model": model,
        "--port": "0",
        "--admin-key": ADMIN_KEY,
        "--hang-timeout": str(settings.hang_timeout),
        "--stall-timeout": str(4 * settings.hang_timeout),
        "--max-restarts": "100",
        "--restart-window": "2",
        "--max-rows": str(min(32, settings.streams)),
        "--max-batch-tokens": "128",  # steps are short, so that a hang is noticed soon
        "--max-model-len": "1024",
        "--num-pages": str(settings.num_pages),
        "--host-memory": "256MiB",
        "--keep-alive": "2",
        "--log-level": "warning",
        "--send-timeout": "20",
        "--response-store": str(folder / "responses.sqlite"),
        "--out-of-memory": "shrink",
        "--chat-template": costly_template(template_source(tokenizer, None)),
    }
    if settings.threads:
        values["--threads"] = str(settings.threads)
    if settings.kernels != "auto":
        values["--kernels"] = settings.kernels
    if settings.speculate is not None:
        values["--speculate"] = settings.speculate
    values |= {"--tp": str(settings.tp), "--pp": str(settings.pp)}
    if settings.tp * settings.pp == 1:  # ranks keep no cache below host memory
        values["--cache-dir"] = str(folder / CACHE)
    flags = [word for flag in values.items() for word in flag]
    flags += ["--random-weights"] if settings.model == "tiny" else []
    return flags + (["--deterministic"] if settings.deterministic else [])
