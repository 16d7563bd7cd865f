"""Packed tensors of quantized checkpoints, each with the tensors that decode it. There is a module per format and one
table, `config.METHODS`, that maps `quantization_config` to it. `shards` reads packed tensors as if they were floats.
"""

from quire.models.packed.base import Packed, StoredTensors
from quire.models.packed.config import Quantization, read_quantization
from quire.models.packed.floats import find_floats

__all__ = ["Packed", "Quantization", "StoredTensors", "find_floats", "read_quantization"]
