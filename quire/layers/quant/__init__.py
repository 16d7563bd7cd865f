"""Quantization schemes: how a linear layer's weight is stored and applied. The loader selects one per model."""

from quire.layers.quant.dense import Dense
from quire.layers.quant.fp8 import Fp8
from quire.layers.quant.fp16_packed import Fp16Packed
from quire.layers.quant.scheme import Scheme

__all__ = ["Dense", "Fp8", "Fp16Packed", "Scheme"]
