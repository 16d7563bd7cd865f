"""Loading takes the memory of the weights once, and some for a tensor on its way, beside the file's mapped pages, which
the kernel takes back when memory is short.

A child process loads and reports its peak of resident memory (VmHWM), which counts the mapped pages as well.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import quire
from tests.cpu.tiny_gguf import write_gguf
from tests.cpu.tiny_models import make_tiny

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")
ROOT = Path(quire.__file__).parent.parent
MARGIN = 48 << 20  # the largest tensor (8 MiB) several times, and what an allocator keeps
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8,
         "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4096}  # fmt: skip
CHILD = """
import sys, warnings
import torch
from quire.files.source import resolve_model
from quire.models.loading import loader, shards

def resident(name):
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status[name].split()[0]) << 10

def load(place):
    given = dict(dtype="auto", device=torch.device("cpu"), max_model_len=None, page_tokens=16)
    return loader.load_model(resolve_model(place), kernels=kernels, quant=quant, **given)

warnings.simplefilter("ignore")
torch.set_num_threads(1)
small, place, kernels, quant, copies = sys.argv[1:]
load(small)  # whatever is imported and started once is there now
if copies == "yes":
    kept, read = [], shards.SafetensorsCheckpoint.read
    def read_twice(self, name, target, index=None):
        read(self, name, target, index)
        kept.append(target.clone())
    shards.SafetensorsCheckpoint.read = read_twice
before = resident("VmRSS")
loaded = load(place)
print(resident("VmHWM") - before, loaded.weights_bytes)
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights as a folder and as a GGUF in blocks, and a tiny model of each kind."""
    folder = tmp_path_factory.mktemp("models")
    types = {r"blk.*(attn|ffn)_\w+\.weight|token_embd.weight": "Q8_0", r".*norm\.weight": "F32"}
    found = {}
    for name, sizes in (("large", SIZES), ("small", {})):
        reference, found[f"{name} folder"] = make_tiny("llama", folder / name, **sizes)
        found[f"{name} gguf"] = folder / f"{name}.gguf"
        write_gguf(reference, "llama", found[f"{name} gguf"], types=types)
    return found


def measure(places: dict[str, Path], kind: str, kernels: str, quant: str, copies: str = "no") -> tuple[int, int]:
    """How much more memory was resident at the peak than before, and the bytes of the weights."""
    argv = [str(places[f"small {kind}"]), str(places[f"large {kind}"]), kernels, quant, copies]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CHILD, *argv], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    peak, weights = map(int, done.stdout.split())
    return peak, weights


def file_bytes(places: dict[str, Path], kind: str) -> int:
    path = places[f"large {kind}"]
    return os.path.getsize(path / "model.safetensors" if path.is_dir() else path)


@pytest.mark.parametrize(
    ("kind", "kernels", "quant"),
    [("folder", "torch", "none"), ("folder", "auto", "q8_0"), ("gguf", "auto", "none"), ("gguf", "torch", "none")],
)
def test_a_model_is_loaded_without_a_second_copy(kind: str, kernels: str, quant: str, places: dict[str, Path]) -> None:
    peak, weights = measure(places, kind, kernels, quant)
    mapped = file_bytes(places, kind)
    print(f"peak {peak >> 20} MiB, weights {weights >> 20} MiB, file {mapped >> 20} MiB")
    assert peak <= weights + mapped + MARGIN
    if kernels == "torch":  # decoded, or as it is: float32
        assert weights > 2 * MARGIN


def test_the_measure_would_notice_a_second_copy(places: dict[str, Path]) -> None:
    peak, weights = measure(places, "folder", "torch", "none", copies="yes")
    assert peak > weights + file_bytes(places, "folder") + MARGIN
