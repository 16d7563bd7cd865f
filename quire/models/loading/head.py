"""Loads a checkpoint's head for multi-token prediction, beside the model that it belongs to."""

from __future__ import annotations

from typing import Any

import torch

from quire.files.progress import Progress, QuietProgress
from quire.files.source import ModelFiles
from quire.layers.weights import weights_bytes
from quire.models.loading.loader import make_build, open_shards, read_config
from quire.models.loading.sources import CheckpointFill, RandomFill, are_copies, fill_model
from quire.models.model import Model
from quire.models.mtp_head import MTPHead
from quire.types import QuireError


def build_head(
    files: ModelFiles,
    model: Model,
    *,
    dtype: str,
    device: torch.device,
    page_tokens: int,
    quant: str = "none",
    kv_dtype: str = "auto",
    random_weights: bool = False,
    required: bool = True,
) -> MTPHead | None:
    """Returns the head of a model's checkpoint on meta; None if there is none and it is not `required`."""
    hf_config = read_config(files)
    build = make_build(
        hf_config,
        dtype=dtype,
        device=device,
        page_tokens=page_tokens,
        quant=quant,
        kv_dtype=kv_dtype,
        ops=model.ops,
    )
    form = model.head_form()
    found = {} if files.kind == "gguf" or random_weights else open_shards(files).shapes
    if form is None or not ((random_weights and required) or f"{form.project}.weight" in found):
        if not required:
            return None
        what = f"{files.name} has no layer for multi-token prediction"
        what = f"{what}." if form is None else f"{what}: there is no tensor {form.project}.weight."
        raise QuireError("no_head", what, "Use another proposer than mtp, such as suffix.", "speculate")
    own = set()
    if not random_weights:
        shards = open_shards(files)
        repeated = [names for names in form.repeats if f"{names[0]}.weight" in found]
        own = {mine for mine, its in repeated if not are_copies(shards, f"{mine}.weight", f"{its}.weight")}
    return MTPHead(form, model, build, own)


def fill_head(
    head: MTPHead, files: ModelFiles, device: torch.device, *, random_weights: bool, progress: Progress | None = None
) -> int:
    """Fills a head's weights; returns their bytes. Missing tensors and wrong shapes are a QuireError."""
    num_bytes = weights_bytes(head)
    progress = progress or QuietProgress()
    progress.start(f"Loading the head of {files.name}", num_bytes)
    try:
        fill: Any = RandomFill(device) if random_weights else CheckpointFill(head, open_shards(files))
        fill_model(head, fill, device, progress.update)
    finally:
        progress.finish()
    return num_bytes
