"""The cache specs of layers with keys and values, in the type that `Build` asks for."""

from __future__ import annotations

from collections.abc import Sequence

from quire.kernels.cache_forms import CACHE_FORMS, HEAD_UNIT
from quire.layers.build import Build
from quire.types import CacheSpec, QuireError

WHOLE = "-whole"  # ends the group of the layers that stay whole while others are packed


def kv_specs(
    build: Build, group: str, layers: Sequence[int], num_kv_heads: int, head_dim: int, window: int | None = None
) -> list[CacheSpec]:
    """Returns one spec for these layers, or two if some of them are packed and others stay whole."""
    packed = [layer for layer in layers if build.packing and layer not in build.whole_layers]
    whole = [layer for layer in layers if layer not in packed]
    specs = []
    if packed:
        if head_dim % HEAD_UNIT:
            what = f"--kv-dtype {build.packing} needs heads of a multiple of {HEAD_UNIT} elements, not of {head_dim}."
            raise QuireError("invalid_parameter", what, "Leave --kv-dtype out.", param="kv_dtype")
        entry = (num_kv_heads, CACHE_FORMS[build.packing].entry_bytes(head_dim))
        specs.append(
            CacheSpec(
                group,
                "paged",
                tuple(packed),
                entry,
                "uint8",
                planes=1,
                page_tokens=build.page_tokens,
                window=window,
                packing=build.packing,
            )
        )
    if whole:
        name = group + WHOLE if packed else group
        dtype = str(build.cache_dtype).removeprefix("torch.")
        entry = (num_kv_heads, head_dim)
        specs.append(CacheSpec(name, "paged", tuple(whole), entry, dtype, page_tokens=build.page_tokens, window=window))
    return specs


def refuse_packing(build: Build, what: str) -> None:
    """Raises an error if the cache is to be packed. `what`: names the model, which has no packed form."""
    if build.packing:
        message = f"--kv-dtype {build.packing} does not cover {what}."
        raise QuireError("invalid_parameter", message, "Leave --kv-dtype out.", param="kv_dtype")


def refuse_whole_layers(build: Build, what: str) -> None:
    """Raises an error if layers are to stay whole in a model whose layers share one cache group."""
    if build.packing and build.whole_layers:
        message = f"--kv-dtype-skip does not cover {what}, whose layers share one type of cache."
        raise QuireError("invalid_parameter", message, "Leave --kv-dtype-skip out.", param="kv_dtype_skip")
