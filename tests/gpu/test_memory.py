"""What `quire doctor` says of a model's memory before it is loaded, and what is then allocated: the pool is sized by
the memory that is free, as it is where nobody says how large it should be. `tests/cpu/families` has the same for every
family and a pool of a given size."""

from __future__ import annotations

import gc
import sys
import tempfile
from pathlib import Path

import torch

from quire.assemble import assemble, memory_report
from quire.config import Config
from quire.config_build import override_config
from tests.cpu.families.harness import all_families, save_checkpoint
from tests.gpu.script import DEVICE, ON_GPU, marks, run_file

pytestmark = marks()

KINDS = ("llama", "gemma3", "gpt_oss", "mixtral", "deepseek_v3", "qwen3_next", "mamba2", "gpt2")
FRACTION = 0.02  # of what is free: pages of such small models are many


def test_the_pool_is_as_the_doctor_says() -> None:
    families = {family.name: family for family in all_families()}
    for name in KINDS:
        folder = Path(tempfile.mkdtemp(prefix="quire-gpu-test-"))
        save_checkpoint(families[name], folder)
        knobs = {"model": str(folder), "device": DEVICE.type, "memory_fraction": FRACTION, "max_rows": 16}
        config = override_config(Config(), knobs)
        said = memory_report(config)
        parts = assemble(config)
        caches = sum(tensor.nbytes for tensor in parts.engine.workers._inner._store.tensors.values())
        print(f"{name}: {said.cache / caches - 1:+.2%} of {caches / 2**20:.0f} MiB")
        assert abs(said.cache - caches) <= 0.02 * caches and parts.memory.cache == caches
        assert abs(said.weights - parts.memory.weights) <= 0.02 * said.weights
        del parts
        gc.collect()
        if ON_GPU:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    run_file(globals(), *sys.argv[1:2])
