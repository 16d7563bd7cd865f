"""Selects the ops of the deterministic mode for a model, and refuses the models that it does not cover.

The loader calls `select_deterministic_ops` for `--deterministic`. A model is covered if every op of its layers
is in the selected row of the ops table and a test compares its bits: `tests/cpu/test_deterministic.py`,
`tests/gpu/test_deterministic.py`.
"""

from __future__ import annotations

from quire.kernels.table import DETERMINISTIC, Ops, deterministic_ops
from quire.models.registry import FAMILIES
from quire.types import QuireError

# dense models covered in plain torch; the native kernels cover every dense model
TORCH_DENSE = ("llama", "mistral", "qwen2", "qwen3")
_CLASSES = {  # class name of a family -> kind of model
    "DenseModel": "dense",
    "MoEModel": "mixture",
    "GptOssModel": "mixture with sinks",
    "DeepSeekModel": "latent",
    "KimiLinearModel": "latent",
    "QwenHybridModel": "hybrid",
    "OlmoHybridModel": "hybrid",
    "NemotronHModel": "hybrid",
    "Mamba2Model": "hybrid",
    "BambaModel": "hybrid",
    "GraniteHybridModel": "hybrid",
    "FalconH1Model": "hybrid",
    "Lfm2Model": "hybrid",
}
_TYPES = {"granitemoe_swa": "mixture with sinks"}  # model types whose kind differs from that of their class
TORCH_KINDS = ("mixture", "latent", "hybrid")
NATIVE_KINDS = ("mixture", "mixture with sinks", "hybrid")
CUDA_KINDS = ("dense", "mixture", "mixture with sinks", "hybrid")


def select_deterministic_ops(
    model_type: str,
    *,
    fits_native: bool,
    in_blocks: bool,
    device_type: str,
    dtype: str,
    quant: str,
    kernels: str,
    kv_dtype: str = "auto",
) -> Ops:
    """Returns the ops of the deterministic mode for this model, or raises an error that says why there are none.

    `fits_native`: the native library runs all layers in one call. `in_blocks`: weights are in quantized blocks, so that
    the native library runs the model op by op.
    """
    ops, kind = deterministic_ops(device_type, kernels), kind_of(model_type)
    if device_type == "cuda":
        return _select_cuda_ops(ops, kind, model_type, quant, kv_dtype)
    if ops.native is not None and (fits_native or (in_blocks and kind in NATIVE_KINDS)):
        return ops
    if kv_dtype != "auto":
        what = f"The deterministic mode supports --kv-dtype {kv_dtype} with the native kernels alone."
        raise QuireError("invalid_parameter", what, "Leave --kv-dtype or --deterministic out.", param="kv_dtype")
    if model_type not in TORCH_DENSE and kind not in TORCH_KINDS:
        hint = "Leave --deterministic out; `quire doctor` shows the kernels."
        if kind == "mixture with sinks":
            hint = (
                "Its attention needs the native kernels: build them and add --quant q8_0, or leave --deterministic out."
            )
        raise _not_covered(f"{model_type} models", hint)
    for name, given, allowed in (("dtype", dtype, ("auto", "float32")), ("quant", quant, ("none",))):
        if given not in allowed:
            reason = "here" if ops.native is not None else "without the native kernels"
            what = f"The deterministic mode does not support --{name} {given} {reason}: it computes in float32."
            raise QuireError("invalid_parameter", what, f"Leave --{name} or --deterministic out.", param=name)
    return DETERMINISTIC


def kind_of(model_type: str) -> str | None:
    """Returns the kind of a model type; None for kinds that the mode does not cover, such as transformers models."""
    class_name = FAMILIES.get(model_type, "").rpartition(":")[2]
    return _TYPES.get(model_type) or _CLASSES.get(class_name)


def _select_cuda_ops(ops: Ops, kind: str | None, model_type: str, quant: str, kv_dtype: str) -> Ops:
    """Returns the CUDA ops if the mode covers the model. Work of a layer outside the ops table is elementwise, or is
    done one row at a time whatever the number of rows.
    """
    if kind not in CUDA_KINDS:
        raise _not_covered(f"{model_type} models on CUDA", "Leave --deterministic out.")
    if quant != "none":
        what = (
            f"The deterministic mode does not support --quant {quant} on CUDA: products depend on the number of rows."
        )
        raise QuireError("invalid_parameter", what, "Leave --quant or --deterministic out.", param="quant")
    if kv_dtype != "auto":
        what = f"The deterministic mode does not support --kv-dtype {kv_dtype} on CUDA: its results are not verified."
        raise QuireError("invalid_parameter", what, "Leave --kv-dtype or --deterministic out.", param="kv_dtype")
    return ops


def _not_covered(what: str, hint: str) -> QuireError:
    return QuireError("invalid_parameter", f"The deterministic mode does not cover {what}.", hint)
