"""Loads the draft network of the setting `speculate`: another model, or the checkpoint's own draft layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.config import Config
from quire.engine.speculation.build import SpeculateSetting, parse_speculate
from quire.files.progress import Progress
from quire.files.source import ModelFiles, resolve_model
from quire.kernels.table import select_ops
from quire.layers.weights import weights_bytes
from quire.models.drafting import DraftModel, DraftNetwork
from quire.models.loading.head import build_head, fill_head
from quire.models.loading.loader import LoadedModel, build_model, load_model, read_config
from quire.models.model import Model
from quire.models.mtp_head import MTPHead
from quire.startup.defaults import resolve_page_tokens
from quire.text.loading import load_tokenizer
from quire.text.tokenizer import Tokenizer
from quire.types import QuireError


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft network with its weights."""

    name: str  # of the proposer
    network: DraftNetwork
    weights_bytes: int


def load_draft(
    config: Config,
    files: ModelFiles,
    loaded: LoadedModel,
    tokenizer: Tokenizer | None,
    device: torch.device,
    progress: Progress,
) -> LoadedDraft | None:
    """Returns the draft network of the setting `speculate`; None if it asks for none. `files`, `loaded`, `tokenizer`:
    the model's."""
    setting = parse_speculate(config.engine.speculate)
    if setting.draft_model is None:
        head = _build_head(setting, config, files, loaded.model, device)
        if head is None:
            return None
        weights = fill_head(head, files, device, random_weights=config.model.random_weights, progress=progress)
        return LoadedDraft("mtp", head, weights)
    return _load_model(setting.draft_model, config, loaded, tokenizer, device, progress)


def _load_model(
    name: str,
    config: Config,
    target: LoadedModel,
    tokenizer: Tokenizer | None,
    device: torch.device,
    progress: Progress,
) -> LoadedDraft:
    files = resolve_draft(name, config, progress)
    check_tokenizers(files, tokenizer)
    loaded = load_model(
        files,
        dtype=config.model.dtype,
        device=device,
        max_model_len=None,
        page_tokens=resolve_page_tokens(config, device),
        random_weights=config.model.random_weights,
        quant=config.model.quant,
        kv_dtype=config.cache.kv_dtype,
        deterministic=config.engine.deterministic,
        kernels=config.engine.kernels,
        strict_kernels=config.engine.strict_kernels,
        progress=progress,
    )
    if tokenizer is None and loaded.model.vocab_size != target.model.vocab_size:
        what = f"{files.name} has a vocabulary of {loaded.model.vocab_size} tokens, the model has one of"
        what = f"{what} {target.model.vocab_size}."
        raise QuireError("unsupported_draft", what, "Choose a draft model with the same tokenizer.", "speculate")
    return LoadedDraft("draft", DraftModel(loaded.model, files.name), loaded.weights_bytes)


def _build_head(
    setting: SpeculateSetting, config: Config, files: ModelFiles, model: Model, device: torch.device
) -> MTPHead | None:
    """Returns the head of the checkpoint on meta; None if none is wanted, or none is there and none is required."""
    if not (setting.head or setting.head_if_any):
        return None
    return build_head(
        files,
        model,
        dtype=config.model.dtype,
        device=device,
        page_tokens=resolve_page_tokens(config, device),
        quant=config.model.quant,
        kv_dtype=config.cache.kv_dtype,
        random_weights=config.model.random_weights,
        required=setting.head,
    )


def build_draft(config: Config, files: ModelFiles, target: Model, device: torch.device) -> LoadedDraft | None:
    """Returns the draft network of the setting `speculate` without its weights, for a memory plan. `files`, `target`:
    the model's."""
    setting = parse_speculate(config.engine.speculate)
    if setting.draft_model is None:
        head = _build_head(setting, config, files, target, device)
        return None if head is None else LoadedDraft("mtp", head, weights_bytes(head))
    files = resolve_draft(setting.draft_model, config, None)
    model, _ = build_model(
        read_config(files),
        dtype=config.model.dtype,
        device=device,
        page_tokens=resolve_page_tokens(config, device),
        quant=config.model.quant,
        kv_dtype=config.cache.kv_dtype,
        ops=select_ops(device.type, config.engine.kernels),
    )
    return LoadedDraft("draft", DraftModel(model, files.name), weights_bytes(model))


def resolve_draft(name: str, config: Config, progress: Progress | None) -> ModelFiles:
    """Returns the files of a draft model, downloading them if needed."""
    model = config.model
    return resolve_model(
        name, token=model.hub_token, offline=model.offline, random_weights=model.random_weights, progress=progress
    )


def check_tokenizers(files: ModelFiles, tokenizer: Tokenizer | None) -> None:
    """Raises if a draft model's tokenizer differs from the model's, with the first token that differs."""
    other = load_tokenizer(files)
    if tokenizer is None:
        return  # token ids only: the sizes of the vocabularies must do
    hint = "Choose a draft model with the same tokenizer."
    if other is None:
        raise QuireError("unsupported_draft", f"The draft model {files.name} has no tokenizer.", hint, "speculate")
    for token_id in range(max(tokenizer.vocab_size, other.vocab_size)):
        mine, its = _spell(tokenizer, token_id), _spell(other, token_id)
        if mine != its:
            what = f"The draft model {files.name} has another tokenizer: token {token_id} is {its} there and {mine} in"
            raise QuireError("unsupported_draft", f"{what} the model.", hint, "speculate")


def _spell(tokenizer: Tokenizer, token_id: int) -> str:
    if token_id >= tokenizer.vocab_size:
        return "missing"
    text = repr(tokenizer.token_bytes(token_id).decode("utf-8", "backslashreplace"))
    return f"the special token {text}" if tokenizer.is_special(token_id) else text
