"""Tensors that published checkpoints keep packed beside what makes them numbers again: a file for each way, one table
(`config.METHODS`) that says which config.json means. `shards` reads them as if they were floats.
"""

from quire.models.packed.base import Packed, Stored
from quire.models.packed.config import Quantization, read_quantization
from quire.models.packed.floats import find_floats

__all__ = ["Packed", "Quantization", "Stored", "find_floats", "read_quantization"]
