"""What `quire doctor` says of a model's memory before it is loaded, and what is then allocated: the pool is sized by
the memory that is free, as it is where nobody says how large it should be. `tests/cpu/families` has the same for every
family and a pool of a given size."""

from __future__ import annotations

import gc
import sys
import tempfile
from pathlib import Path

import torch

from quire.cache.memory import MemoryPlan
from quire.config import Config
from quire.config_build import override_config
from quire.models.loading.device_memory import available_memory
from quire.startup.assemble import assemble
from quire.startup.cache_plan import memory_report
from tests.cpu.families.harness import all_families, save_checkpoint
from tests.gpu.script import DEVICE, ON_GPU, marks, run_file

pytestmark = marks()

KINDS = ("llama", "gemma3", "gpt_oss", "mixtral", "deepseek_v3", "qwen3_next", "kimi_linear", "mamba2",
         "gpt2")  # fmt: skip
FRACTION = 0.02  # of what is free: pages of such small models are many
QUIET = 0.01  # of what is free: others took or gave back no more meanwhile
TRIES = 20


def test_the_pool_is_as_the_doctor_says() -> None:
    families = {family.name: family for family in all_families()}
    for name in KINDS:
        folder = Path(tempfile.mkdtemp(prefix="quire-gpu-test-"))
        save_checkpoint(families[name], folder)
        knobs = {"model": str(folder), "device": DEVICE.type, "memory_fraction": FRACTION, "max_rows": 16}
        config = override_config(Config(), knobs)
        for _ in range(TRIES):
            free = _free_memory()
            said, had, caches = _compare(config)
            if abs(_free_memory() - free) <= QUIET * free:
                break
        else:
            import pytest

            pytest.skip("other processes took and gave back memory of this device all the while")
        print(f"{name}: {said.cache / caches - 1:+.2%} of {caches / 2**20:.0f} MiB")
        assert abs(said.cache - caches) <= 0.02 * caches and had.cache == caches
        assert abs(said.weights - had.weights) <= 0.02 * said.weights


def _compare(config: Config) -> tuple[MemoryPlan, MemoryPlan, int]:
    """What is said, what is planned when the model is loaded, and the bytes that are then allocated."""
    said = memory_report(config)
    parts = assemble(config)
    caches = sum(tensor.nbytes for tensor in parts.engine.workers.inner.store.tensors.values())
    return said, parts.memory, caches


def _free_memory() -> int:
    """Once nothing of ours is left: what changes between two looks is what others do."""
    gc.collect()
    if not ON_GPU:
        return available_memory(DEVICE)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(DEVICE)[0]


if __name__ == "__main__":
    run_file(globals(), *sys.argv[1:2])
