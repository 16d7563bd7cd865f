"""The language model inside a checkpoint that also has eyes: its config, and its tensors under their usual names.

The loader asks `text_part` what a config.json holds; a model with images of its own family never gets here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quire.layers.weights import PartSource
from quire.models.fallback.build import is_causal
from quire.models.loading.shards import SafetensorsCheckpoint
from quire.models.registry import FAMILIES

_BEGINNINGS = {  # as files have been published over the years -> as a model of text alone has them
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.llm.": "model.llm.",  # which transformers renames
    "lm_head.": "lm_head.",
}
# Said of the whole, true of the part.
_WHOLE = ("tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype", "quantization_config")


def text_part(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The language model's own config; None where there is nothing but a language model, or none that we know."""
    text = config.get("text_config")
    if not isinstance(text, dict) or config.get("model_type") in FAMILIES:
        return None
    kind = text.get("model_type")
    if not isinstance(kind, str) or not (kind in FAMILIES or is_causal(kind)):
        return None
    return {**{key: config[key] for key in _WHOLE if config.get(key) is not None}, **text}


class TextPart:
    """A checkpoint as if the language model were all there is of it."""

    def __init__(self, whole: SafetensorsCheckpoint):
        self.where = whole.where
        self._whole = whole
        self._names: dict[str, str] = {}  # our name -> the whole's
        for name in whole.shapes:
            ours = next((new + name[len(old) :] for old, new in _BEGINNINGS.items() if name.startswith(old)), None)
            if ours is not None:
                self._names[ours] = name
        self.shapes = {ours: whole.shapes[name] for ours, name in self._names.items()}
        self.types = {ours: whole.types[name] for ours, name in self._names.items()}

    def read(self, name: str, target: Tensor, index: int | None = None) -> None:
        self._whole.read(self._names[name], target, index)

    def source(self, name: str, index: int | None = None) -> PartSource:
        return self._whole.source(self._names[name], index)
