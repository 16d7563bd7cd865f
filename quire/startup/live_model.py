"""Other weights for a running engine: loads and proves them beside the present ones, and puts them in their place.

`assemble` makes one for an engine whose model runs in its process. `engine.model_host` says when it is called. Both
sets of weights are in memory until the present ones are replaced; a failure leaves these untouched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.config import Config, knobs
from quire.config_build import override_config
from quire.files.source import ModelFiles, resolve_model
from quire.files.weights_digest import weights_digest
from quire.models.loading.loader import LoadedModel, load_model
from quire.runtime.guard import release_memory
from quire.runtime.runner import Runner
from quire.startup.defaults import resolve_page_tokens
from quire.types import QuireError, Request, SamplingParams

PROBE_TOKENS = 64
PROBE = (
    "The library opens at nine in the morning and closes at six. Readers may borrow four books for three weeks, and "
    "renew each of them twice unless another reader has asked for it. Children under twelve need a card of their own, "
    "which a parent signs. Newspapers and maps stay in the reading room on the second floor."
)
# Returns the engine that computes the probe; `assemble.build_model_engine`, which can't be imported from here.
MakeEngine = Callable[..., tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class LoadedCandidate:
    """Implements `engine.model_host.Candidate`."""

    loaded: LoadedModel
    files: ModelFiles
    config: Config
    version: bytes
    checks: Mapping[str, float]


class LiveModel:
    """Implements `engine.model_host.ModelHost`."""

    def __init__(
        self,
        config: Config,
        files: ModelFiles,
        loaded: LoadedModel,
        runner: Runner,
        device: torch.device,
        make_engine: MakeEngine,
        encode: Callable[[str], Sequence[int]] | None,
    ):
        """`encode`: the tokenizer; None: the probe is of arbitrary tokens."""
        self._config, self._files, self._device = config, files, device
        self._specs, self._vocab_size = list(loaded.model.specs), loaded.model.vocab_size
        self._kind = type(loaded.model)
        self._loaded: LoadedModel | None = loaded
        self._runner = runner
        self._make_engine = make_engine
        self._encode = encode
        self._threads = config.engine.threads or torch.get_num_threads()

    def build(self, model: str | None, quant: str | None, max_loss: float) -> LoadedCandidate:
        changes: dict[str, Any] = {}
        if quant is not None:
            changes["quant"] = self._checked_quant(quant)
        files = self._files
        if model is not None:
            changes["model"] = model
            files = resolve_model(model, offline=True)
        config = override_config(self._config, changes)
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)  # of this thread; loading and the native kernels go by it
        try:
            loaded = self._load(config, files)
            self._check_place(loaded, files)
            checks = self._prove(loaded, max_loss)
        finally:
            torch.set_num_threads(threads)
        settings = repr([config.model.dtype, config.model.quant, config.cache.kv_dtype, config.cache.kv_dtype_skip])
        return LoadedCandidate(loaded, files, config, weights_digest(files, settings), checks)

    def use(self, candidate: Any) -> None:
        assert isinstance(candidate, LoadedCandidate)
        self._runner.replace_model(candidate.loaded.model, candidate.loaded.places)
        self._config, self._files, self._loaded = candidate.config, candidate.files, candidate.loaded
        release_memory(self._device)

    def drop(self, *, cache: bool) -> None:
        self._loaded = None
        self._runner.replace_model(None, None)
        if cache:
            self._runner.store.release()
        release_memory(self._device)

    def _checked_quant(self, quant: str) -> str:
        choices = knobs()["quant"].choices or ()
        name = "none" if quant == "auto" else quant
        if name not in choices:
            what = f"weights={quant!r} is no precision of weights."
            raise QuireError("invalid_parameter", what, f"Choose one of auto, {', '.join(choices)}.", "weights")
        return name

    def _load(self, config: Config, files: ModelFiles) -> LoadedModel:
        return load_model(
            files,
            dtype=config.model.dtype,
            device=self._device,
            max_model_len=config.model.max_model_len,
            page_tokens=resolve_page_tokens(config, self._device),
            random_weights=config.model.random_weights,
            quant=config.model.quant,
            kv_dtype=config.cache.kv_dtype,
            kv_skip=config.cache.kv_dtype_skip,
            deterministic=config.engine.deterministic,
            kernels=config.engine.kernels,
            strict_kernels=config.engine.strict_kernels,
        )

    def _check_place(self, loaded: LoadedModel, files: ModelFiles) -> None:
        """Raises unless the cache, the sampler and the adapters can go on with the new model."""
        new = loaded.model
        if type(new) is not self._kind or new.vocab_size != self._vocab_size or list(new.specs) != self._specs:
            what = f"{files.name} is not the model that runs here with other weights: its layers or vocabulary differ."
            raise QuireError("weights_mismatch", what, "Start another server for it.", "model")

    def _prove(self, loaded: LoadedModel, max_loss: float) -> dict[str, float]:
        """Computes the probe with the new weights and, if these must not lose much, with the present ones."""
        new = self._loss(loaded)
        if not math.isfinite(new):
            what = "The new weights compute no finite numbers."
            raise QuireError("bad_weights", what, "The old ones stay.", "weights")
        if self._loaded is None or max_loss == float("inf"):
            return {"loss": new}
        old = self._loss(self._loaded)
        if new - old > max_loss:
            what = f"The new weights lose {new - old:.3f} nats per token on the probe, {max_loss:g} is the limit."
            raise QuireError("quality_check", what, "The old ones stay; raise max_loss if that is meant.", "weights")
        return {"loss": new, "loss_before": old}

    def _loss(self, loaded: LoadedModel) -> float:
        """Returns the mean negative log-likelihood of the probe's tokens."""
        tokens = self._probe_tokens()
        small = {"max_rows": 1, "num_pages": 64, "num_slots": 4, "host_memory": 0, "host_cache": False, "graphs": False}
        more = {"speculate": "off", "verify": "exact", "cache_dir": None, "shared_cache": None, "trace": None}
        config = override_config(replace(self._config), {**small, **more, "adapter_slots": 0, "max_batch_tokens": 256})
        engine, _ = self._make_engine(loaded.model, config, PROBE_TOKENS + 8, self._device)
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0).resolve()
        engine.add(Request("probe", tokens, len(tokens), params, len(tokens) + 1))
        scores = [one.logprob for delta in engine.run_until_idle() for one in delta.prompt_logprobs or ()]
        engine.close()
        return -float(sum(scores)) / max(len(scores), 1)

    def _probe_tokens(self) -> list[int]:
        tokens = [] if self._encode is None else [t for t in self._encode(PROBE) if t < self._vocab_size]
        return tokens[:PROBE_TOKENS] or [7919 * place % self._vocab_size for place in range(PROBE_TOKENS)]
