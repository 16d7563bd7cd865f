"""Maps `quantization_config` of config.json to the function that finds packed tensors. `METHODS` has a line per method;
others are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.models.packed.awq import find_awq
from quire.models.packed.base import Finder, unsupported
from quire.models.packed.bitsandbytes import find_bitsandbytes
from quire.models.packed.compressed import find_compressed
from quire.models.packed.floats import Block, find_floats
from quire.models.packed.gptq import find_gptq
from quire.types import QuireError

FP8_FORMATS = ("e4m3", "float8_e4m3fn")  # synonyms


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint is quantized."""

    display_name: str  # display name
    find: Finder

    @property
    def fp8_note(self) -> str:
        """Describes, for a note, what `--quant fp8` would keep."""
        kept = {
            "FP8": "linear layers and experts in FP8",
            "MXFP4": "them in FP8, at half the size and nearly without loss",
        }
        return f"keeps {kept.get(self.display_name, 'linear layers and experts in FP8, at half the size')}"


def read_quantization(hf_config: Mapping[str, Any]) -> Quantization | None:
    """Returns the checkpoint's quantization; None if it has none. Unlisted MXFP4 needs none: its tensors are
    self-describing.
    """
    declared = hf_config.get("quantization_config")
    if not declared:
        return None
    method = declared.get("quant_method", "an unknown method") if isinstance(declared, dict) else declared
    found = METHODS.get(method) if isinstance(declared, dict) and isinstance(method, str) else None
    if found is None:
        known = ", ".join(sorted(METHODS))
        raise unsupported(
            f"This checkpoint is quantized with {method!s:.80}, which is not supported",
            f"Use the original checkpoint, a GGUF file, or one of {known}.",
        )
    display_name, make = found
    return Quantization(display_name, make(declared))


def _find_fp8(config: Mapping[str, Any]) -> Finder:
    if config.get("fmt", "e4m3") not in FP8_FORMATS:
        what = f"This checkpoint is in FP8 of the format {config['fmt']!r}, which is not supported"
        raise unsupported(what, "Use the original checkpoint, or one in the format e4m3.")
    return find_floats(_read_block(config.get("weight_block_size")))


def _read_block(block: Any) -> Block | None:
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        what = f"weight_block_size in config.json is {block!r}, where two whole numbers above 0 are needed."
        raise QuireError("bad_config", what, "Give rows and columns, such as [128, 128].")
    return block[0], block[1]


def _find_by_tensors(config: Mapping[str, Any]) -> Finder:
    """ModelOpt (NVIDIA) and FBGEMM (Meta) are fully described by the shapes of their scales. Blocks are 128 x 128."""
    return find_floats((128, 128))


def _find_mxfp4(config: Mapping[str, Any]) -> Finder:
    return find_floats(has_fp8=False)


def _find_auto_round(config: Mapping[str, Any]) -> Finder:
    form = str(config.get("packing_format"))
    if "awq" in form:
        return find_awq(config)
    if "llm_compressor" in form:
        return find_compressed(config)
    return find_gptq(config)


METHODS: dict[str, tuple[str, Callable[[Mapping[str, Any]], Finder]]] = {
    "fp8": ("FP8", _find_fp8),
    "fbgemm_fp8": ("FP8", _find_by_tensors),
    "modelopt": ("ModelOpt", _find_by_tensors),
    "mxfp4": ("MXFP4", _find_mxfp4),
    "gptq": ("GPTQ", find_gptq),
    "awq": ("AWQ", find_awq),
    "auto-round": ("AutoRound", _find_auto_round),
    "intel/auto-round": ("AutoRound", _find_auto_round),
    "compressed-tensors": ("compressed-tensors", find_compressed),
    "bitsandbytes": ("bitsandbytes", find_bitsandbytes),
}
