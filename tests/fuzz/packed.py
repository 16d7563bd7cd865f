"""Checkpoints that are quantized already, fuzzed: their config and their tensors' names, types and shapes. Needs torch,
so it stands apart from the other targets."""

from __future__ import annotations

import json
import math
import random
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from quire.files.safetensors import BITS
from quire.models.loading.shards import SafetensorsCheckpoint
from quire.models.packed import read_quantization
from tests.cpu.packers import FORMATS
from tests.fuzz.mutate import mutate_json
from tests.fuzz.targets import Fuzzed

MOST_BYTES = 1 << 18
NAMES = ("m.weight", "m.qweight", "m.scales", "m.qzeros", "m.g_idx", "m.weight_packed", "m.weight_scale", "m.bias",
         "m.weight_scale_inv", "m.weight_scale_2", "m.weight_global_scale", "m.weight_zero_point", "m.SCB")  # fmt: skip


class PackedCheckpoint(Fuzzed):
    """A case is [config, {name: [type, shape]}, how many bytes of what real files hold are kept]."""

    name = "packed"

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._path = folder / "fuzz.safetensors"
        weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * 0.1
        self._seeds = []
        for form in FORMATS:
            file = save({f"m.{end}": part.contiguous().clone() for end, part in form.pack(weight)[0].items()})
            (header_len,) = struct.unpack("<Q", file[:8])
            header = json.loads(file[8 : 8 + header_len])
            tensors = {name: [entry["dtype"], entry["shape"]] for name, entry in header.items()}
            self._seeds.append([form.config, tensors, file[8 + header_len :].hex()])

    def make(self, rng: random.Random) -> bytes:
        config, tensors, data = rng.choice(self._seeds)
        config, tensors = dict(config), dict(tensors)
        if rng.random() < 0.5:
            config = mutate_json(rng, config)
        if rng.random() < 0.6:
            self._change(rng, tensors)
        return json.dumps([config, tensors, data if rng.random() < 0.8 else "00"]).encode("utf-8", "surrogatepass")

    def _change(self, rng: random.Random, tensors: dict[str, Any]) -> None:
        name = rng.choice(list(tensors))
        kind, shape = tensors[name]
        shape = list(shape)
        what = rng.randrange(6)
        if what == 0:
            del tensors[name]
        elif what == 1:
            tensors[name] = [rng.choice(list(BITS)), shape]
        elif what == 2 and shape:
            shape[rng.randrange(len(shape))] = rng.choice((0, 1, 2, 7, 16, 31, 33, 64, 128))
            tensors[name] = [kind, shape]
        elif what == 3:
            tensors[name] = [kind, rng.choice((shape[::-1], shape[1:], [*shape, 1], [2, *shape], []))]
        elif what == 4:
            tensors[rng.choice(NAMES)] = [kind, shape]
        else:
            tensors[rng.choice(NAMES)] = tensors.pop(name)

    def run(self, case: bytes) -> None:
        config, tensors, data = json.loads(case)
        header, place = {}, 0
        for name, (kind, shape) in tensors.items():
            size = math.prod(shape) * BITS[kind] // 8
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [place, place + size]}
            place += size
        if place > MOST_BYTES:
            return
        written = json.dumps(header).encode()
        kept = bytes.fromhex(data)
        body = (kept * (place // max(1, len(kept)) + 1))[:place]
        self._path.write_bytes(struct.pack("<Q", len(written)) + written + body)
        quantized = read_quantization({"quantization_config": config})
        checkpoint = SafetensorsCheckpoint([self._path], "fuzz", quantized)
        for name, shape in checkpoint.shapes.items():
            checkpoint.read(name, torch.empty(shape))
            if len(shape) == 2 and shape[0]:
                checkpoint.source(name).read(0, 1)
