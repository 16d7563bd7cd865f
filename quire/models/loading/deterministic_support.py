"""Which models the deterministic mode covers, and with which row of the ops table. All else is refused in one line.

The loader asks when `--deterministic` is given. A model is covered where everything its layers do is in that row, and
where a test compares its bits: `tests/cpu/test_deterministic.py`, `tests/gpu/test_deterministic.py`.
"""

from __future__ import annotations

from quire.kernels.table import FIXED, Ops, select_fixed_ops
from quire.models.registry import FAMILIES
from quire.types import QuireError

FIXED_DENSE = ("llama", "mistral", "qwen2", "qwen3")  # that torch alone runs; the native kernels run all dense ones
_CLASSES = {  # of a family
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
_TYPES = {"granitemoe_swa": "mixture with sinks"}  # of another kind than most of their class
IN_TORCH = ("mixture", "latent", "hybrid")
NATIVE_OP_BY_OP = ("mixture", "mixture with sinks", "hybrid")
ON_CUDA = ("dense", "mixture", "mixture with sinks", "hybrid")


def fixed_ops(
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
    """`fits_native`: the native library runs all layers in one call; `in_blocks`: it keeps the weights, and runs the
    model op by op."""
    ops, kind = select_fixed_ops(device_type, kernels), kind_of(model_type)
    if device_type == "cuda":
        return _on_cuda(ops, kind, model_type, quant, kv_dtype)
    if ops.native is not None and (fits_native or (in_blocks and kind in NATIVE_OP_BY_OP)):
        return ops
    if model_type not in FIXED_DENSE and kind not in IN_TORCH:
        hint = "Leave --deterministic out; `quire doctor` shows the kernels."
        if kind == "mixture with sinks":
            hint = (
                "Its attention needs the native kernels: build them and add --quant q8_0, or leave --deterministic out."
            )
        raise _uncovered(f"{model_type} models", hint)
    for name, given, allowed in (("dtype", dtype, ("auto", "float32")), ("quant", quant, ("none",))):
        if given not in allowed:
            reason = "here" if ops.native is not None else "without the native kernels"
            what = f"The deterministic mode takes no --{name} {given} {reason}: it computes in float32."
            raise QuireError("invalid_parameter", what, f"Leave --{name} or --deterministic out.", param=name)
    return FIXED


def kind_of(model_type: str) -> str | None:
    """None: of no kind the mode knows, like what transformers' own code runs."""
    class_name = FAMILIES.get(model_type, "").rpartition(":")[2]
    return _TYPES.get(model_type) or _CLASSES.get(class_name)


def _on_cuda(ops: Ops, kind: str | None, model_type: str, quant: str, kv_dtype: str) -> Ops:
    """What layers do beside the table's ops is done there element by element, or to one row at a time whatever the
    number of rows."""
    if kind not in ON_CUDA:
        raise _uncovered(f"{model_type} models on CUDA", "Leave --deterministic out.")
    if quant != "none":
        what = f"The deterministic mode takes no --quant {quant} on CUDA: its products go by the number of rows."
        raise QuireError("invalid_parameter", what, "Leave --quant or --deterministic out.", param="quant")
    if kv_dtype != "auto":
        what = f"The deterministic mode takes no --kv-dtype {kv_dtype} on CUDA: nobody has compared its bits."
        raise QuireError("invalid_parameter", what, "Leave --kv-dtype or --deterministic out.", param="kv_dtype")
    return ops


def _uncovered(what: str, hint: str) -> QuireError:
    return QuireError("invalid_parameter", f"The deterministic mode does not cover {what}.", hint)
