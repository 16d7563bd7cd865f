"""Adapters made by PEFT itself on tiny models, as folders, with B matrices that change tokens."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

peft = pytest.importorskip("peft")


def linear_names(reference: Any) -> list[str]:
    """The names of a model's linear layers, without the head."""
    modules = reference.named_modules()
    return sorted({n.rpartition(".")[2] for n, m in modules if isinstance(m, torch.nn.Linear)} - {"lm_head"})


def save_adapter(
    reference: Any, folder: Path, targets: Sequence[str], *, rank: int, seed: int, spread: float = 0.1, **config: Any
) -> Path:
    """Saves an adapter of a transformers model with random matrices; the model itself stays unchanged."""
    config.setdefault("lora_alpha", 2 * rank)
    shutil.rmtree(folder, ignore_errors=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(reference, peft.LoraConfig(r=rank, target_modules=list(targets), **config))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name or "modules_to_save" in name:
                    parameter.normal_(0.0, spread, generator=generator)
        model.save_pretrained(str(folder))
        model.unload()
    reference.__dict__.pop("peft_config", None)
    return folder


@contextmanager
def adapted(reference: Any, folder: Path | None, *, merges: bool = True) -> Iterator[Any]:
    """The transformers model with an adapter, merged into its weights by PEFT or beside them; afterwards as before."""
    if folder is None:
        yield reference
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(reference, str(folder)).eval()
        if merges:
            model.merge_adapter()
        try:
            yield model
        finally:
            if merges:
                model.unmerge_adapter()
            model.unload()
            reference.__dict__.pop("peft_config", None)


def check_greedy(reference: Any, prompt: list[int], tokens: list[int]) -> None:
    """Each token is the reference's own choice after all before it."""
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0].float()
    chosen = logits[len(prompt) - 1 :].argmax(-1).tolist()
    wrong = next((i for i, pair in enumerate(zip(tokens, chosen, strict=True)) if pair[0] != pair[1]), None)
    assert wrong is None, f"token {wrong} after a prompt of {len(prompt)} is not what the adapted model samples"
