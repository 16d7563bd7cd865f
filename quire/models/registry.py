"""Maps model types to classes. The loader calls `find_model_type` with a config.json, then `find_family`.

A family is imported when it is needed, so that a start does not import the others. A new family is a line in
`FAMILIES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from quire.models.model import Family
from quire.types import QuireError

_DENSE = "quire.models.families.dense.decoder:DenseModel"
_MOE = "quire.models.families.moe:MoEModel"
FAMILIES = {  # model_type of a config.json -> module and class
    "arcee": _DENSE,
    "cohere": _DENSE,
    "cohere2": _DENSE,
    "cwm": _DENSE,
    "ernie4_5": _DENSE,
    "exaone4": _DENSE,
    "gemma": _DENSE,
    "gemma2": _DENSE,
    "gemma3_text": _DENSE,
    "gemma4_text": "quire.models.families.gemma4:Gemma4Model",
    "glm": _DENSE,
    "glm4": _DENSE,
    "gpt_neox": _DENSE,
    "granite": _DENSE,
    "granite_swa": _DENSE,
    "helium": _DENSE,
    "hunyuan_v1_dense": _DENSE,
    "hyperclovax": _DENSE,
    "jais2": _DENSE,
    "llama": _DENSE,
    "mimo": _DENSE,
    "ministral": _DENSE,
    "ministral3": _DENSE,
    "mistral": _DENSE,
    "nemotron": _DENSE,
    "olmo": _DENSE,
    "olmo2": _DENSE,
    "olmo3": _DENSE,
    "persimmon": _DENSE,
    "phi": _DENSE,
    "phi3": _DENSE,
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "seed_oss": _DENSE,
    "smollm3": _DENSE,
    "stablelm": _DENSE,
    "starcoder2": _DENSE,
    "vaultgemma": _DENSE,
    "deepseek_v2": "quire.models.families.deepseek:DeepSeekModel",
    "deepseek_v3": "quire.models.families.deepseek:DeepSeekModel",
    "afmoe": _MOE,
    "aria_text": _MOE,
    "cohere2_moe": _MOE,
    "dots1": _MOE,
    "ernie4_5_moe": _MOE,
    "exaone_moe": _MOE,
    "flex_olmo": _MOE,
    "glm4_moe": _MOE,
    "glm4_moe_lite": "quire.models.families.deepseek:DeepSeekModel",
    "gpt_oss": "quire.models.families.gpt_oss:GptOssModel",
    "granitemoe": _MOE,
    "granitemoe_swa": _MOE,
    "granitemoeshared": _MOE,
    "hunyuan_v1_moe": _MOE,
    "hy_v3": _MOE,
    "kimi_k2": "quire.models.families.deepseek:DeepSeekModel",
    "mellum": _MOE,
    "minicpm3": "quire.models.families.deepseek:DeepSeekModel",
    "minimax_m2": _MOE,
    "mixtral": _MOE,
    "olmoe": _MOE,
    "qwen2_moe": _MOE,
    "qwen3_moe": _MOE,
    "solar_open": _MOE,
    "youtu": "quire.models.families.deepseek:DeepSeekModel",
    "qwen3_next": "quire.models.families.qwen3_next:QwenHybridModel",
    "qwen3_5": "quire.models.families.qwen3_next:QwenHybridModel",
    "qwen3_5_text": "quire.models.families.qwen3_next:QwenHybridModel",
    "qwen3_5_moe": "quire.models.families.qwen3_next:QwenHybridModel",
    "qwen3_5_moe_text": "quire.models.families.qwen3_next:QwenHybridModel",
    "olmo_hybrid": "quire.models.families.olmo_hybrid:OlmoHybridModel",
    "kimi_linear": "quire.models.families.kimi_linear:KimiLinearModel",
    "falcon_h1": "quire.models.families.falcon_h1:FalconH1Model",
    "lfm2": "quire.models.families.lfm2:Lfm2Model",
    "lfm2_moe": "quire.models.families.lfm2:Lfm2Model",
    "nemotron_h": "quire.models.families.nemotron_h:NemotronHModel",
    "mamba2": "quire.models.families.mamba2:Mamba2Model",
    "bamba": "quire.models.families.bamba:BambaModel",
    "granitemoehybrid": "quire.models.families.granite_hybrid:GraniteHybridModel",
}
FALLBACK = "quire.models.fallback.model:FallbackModel"
ARCHITECTURES = {  # entry of `architectures` -> model_type, for a config.json without one
    "LlamaForCausalLM": "llama",
    "MiMoForCausalLM": "mimo",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "GptOssForCausalLM": "gpt_oss",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "NemotronHForCausalLM": "nemotron_h",
    "KimiLinearForCausalLM": "kimi_linear",
    "Mamba2ForCausalLM": "mamba2",
    "BambaForCausalLM": "bamba",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
}
# general.architecture of a GGUF file -> model_type; converted Mistral models have the architecture llama
GGUF_ARCHITECTURES = {
    "arcee": "arcee",
    "chatglm": "glm",
    "cohere2": "cohere2",
    "command-r": "cohere",
    "deepseek2": "deepseek_v2",
    "dots1": "dots1",
    "ernie4_5": "ernie4_5",
    "ernie4_5-moe": "ernie4_5_moe",
    "exaone-moe": "exaone_moe",
    "exaone4": "exaone4",
    "falcon-h1": "falcon_h1",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "glm4": "glm4",
    "glm4moe": "glm4_moe",
    "gpt-oss": "gpt_oss",
    "gptneox": "gpt_neox",
    "granite": "granite",
    "granitehybrid": "granitemoehybrid",
    "granitemoe": "granitemoeshared",
    "hunyuan-dense": "hunyuan_v1_dense",
    "hunyuan-moe": "hunyuan_v1_moe",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2_moe",
    "llama": "llama",
    "mamba2": "mamba2",
    "minimax-m2": "minimax_m2",
    "mistral": "mistral",
    "mistral3": "ministral3",
    "nemotron": "nemotron",
    "nemotron_h": "nemotron_h",
    "nemotron_h_moe": "nemotron_h",
    "olmo": "olmo",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "phi2": "phi",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}


def find_model_type(config: Mapping[str, Any]) -> str:
    """Returns the model type of a config.json: its `model_type`, or else the one of its `architectures`."""
    names = [config.get("model_type"), *(ARCHITECTURES.get(name) for name in config.get("architectures") or ())]
    model_type = next((name for name in names if name is not None), None)
    if not isinstance(model_type, str):
        if model_type is not None:
            raise unsupported(f"Model type {model_type!r}")
        raise unsupported(f"Model type {', '.join(config.get('architectures') or ()) or '(config.json names none)'}")
    return model_type


def find_family(model_type: str) -> Family:
    """Returns the family of a model type, or else the fallback model, which runs transformers models."""
    module, _, attribute = FAMILIES.get(model_type, FALLBACK).partition(":")
    return getattr(importlib.import_module(module), attribute)


def unsupported(what: str) -> QuireError:
    return QuireError("unsupported_model", f"{what} is not supported.", supported_types(what))


def supported_types(wanted: str) -> str:
    """Returns the hint for an unsupported type: similar model types, and where all are listed."""
    words = wanted.lower().replace("'", " ").split()
    near = sorted({name for word in words for name in get_close_matches(word, FAMILIES, cutoff=0.75)})
    like = f"Similar types: {', '.join(near)}. " if near else ""
    return (
        f"{like}docs/models.md lists all {len(FAMILIES)} types with a family of their own, "
        "and what runs through transformers."
    )
