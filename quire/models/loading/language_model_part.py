"""Extracts the language model from a multimodal checkpoint: its config, and its tensors under their usual names.

The loader calls `language_model_config` with a config.json. A multimodal model type with a family of its own is
left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quire.layers.weights import PartSource
from quire.models.fallback.build import is_causal
from quire.models.loading.shards import SafetensorsCheckpoint
from quire.models.registry import FAMILIES

_PREFIXES = {  # prefix in a published multimodal checkpoint -> prefix in the language model's own
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.llm.": "model.llm.",  # transformers renames these
    "lm_head.": "lm_head.",
}
# Fields that multimodal configs have at their top level although they apply to the language model.
_TOP_LEVEL_FIELDS = ("tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype", "quantization_config")


def language_model_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the config of the language model; None if the config is no multimodal one, or its language model is
    unknown.
    """
    text = config.get("text_config")
    if not isinstance(text, dict) or config.get("model_type") in FAMILIES:
        return None
    kind = text.get("model_type")
    if not isinstance(kind, str) or not (kind in FAMILIES or is_causal(kind)):
        return None
    return {**{key: config[key] for key in _TOP_LEVEL_FIELDS if config.get(key) is not None}, **text}


class LanguageModelCheckpoint:
    """A view of a multimodal checkpoint that contains the language model's tensors only, under their usual names."""

    def __init__(self, whole: SafetensorsCheckpoint):
        self.where = whole.where
        self._whole = whole
        self._names: dict[str, str] = {}  # name in the language model -> name in the file
        for name in whole.shapes:
            ours = next((new + name[len(old) :] for old, new in _PREFIXES.items() if name.startswith(old)), None)
            if ours is not None:
                self._names[ours] = name
        self.shapes = {ours: whole.shapes[name] for ours, name in self._names.items()}
        self.types = {ours: whole.types[name] for ours, name in self._names.items()}

    def read(self, name: str, target: Tensor, index: int | None = None) -> None:
        self._whole.read(self._names[name], target, index)

    def source(self, name: str, index: int | None = None) -> PartSource:
        return self._whole.source(self._names[name], index)
