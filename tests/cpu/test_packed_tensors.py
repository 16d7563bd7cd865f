"""Checkpoints in FP8: what is loaded from them is what transformers decodes, whatever the blocks; and every fault of
such a file is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.files.source import resolve_model
from quire.layers.weights import PartSource
from quire.models.fallback.model import FallbackModel
from quire.models.loading.loader import LoadedModel, list_notes, load_model, supports_fp8
from quire.models.loading.shards import SafetensorsCheckpoint
from quire.models.packed import Quantization, find_floats
from quire.types import QuireError
from tests.cpu.families.harness import Family, all_families, save_checkpoint
from tests.cpu.packers import PRODUCTS, say
from tests.cpu.paged_harness import HarnessRow, PagedHarness

CPU = torch.device("cpu")
LARGEST = 448.0  # of e4m3
TOKENS = [(7 * i * i + 3) % 256 for i in range(50)]
UP = "model.layers.1.mlp.up_proj.weight"

Scaled = dict[str, Tensor]
Change = Callable[[Scaled], object]


def family(name: str) -> Family:
    return next(family for family in all_families() if family.name == name)


def pack(weight: Tensor, block: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """One matrix in FP8, and its scales, block by block."""
    rows, columns = block or weight.shape
    packed = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            here = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = weight[here].abs().max() / LARGEST
            packed[here] = (weight[here] / scales[i, j]).to(packed.dtype)
    return packed, scales


def pack_folder(folder: Path, block: tuple[int, int] | None, scale_dtype: torch.dtype = torch.float32) -> None:
    """Every product of its layers, as such files are published; without a block one scale for each, and one for
    activations."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if name.endswith(PRODUCTS):
            tensors[name], scales = pack(tensor, block)
            tensors[f"{name}_scale_inv"] = scales.to(scale_dtype) if block else scales.reshape(())
            if block is None:
                tensors[name.replace("weight", "activation_scale")] = torch.tensor(0.25)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    scheme = "dynamic" if block else "static"
    size = {"fmt": "float8_e4m3fn", "weight_block_size": list(block)} if block else {}
    say(folder, {"quant_method": "fp8", "activation_scheme": scheme, **size})


def edit(folder: Path, change: Change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path, **options: Any) -> LoadedModel:
    given = {"dtype": "float32", "device": CPU, "max_model_len": None, "page_tokens": 16, **options}
    return load_model(resolve_model(str(folder)), **given)


def logits_of(model: Any) -> Tensor:
    row = HarnessRow(list(TOKENS))
    harness = PagedHarness(model, num_pages=40, seed=2)
    return torch.cat([harness.step([(row, count)]) for count in (20, 1, 29)])


@pytest.mark.parametrize(("name", "block", "scale_dtype"), [
    ("qwen3", (16, 32), torch.bfloat16), ("qwen3_moe", (8, 8), torch.float32), ("mistral", None, torch.float32),
    ("deepseek_v3", (4, 4), torch.float32), ("minimax_m2", (8, 8), torch.float32),
    ("qwen3_next", (8, 8), torch.bfloat16), ("apertus", (32, 16), torch.float32),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*")
def test_it_is_what_transformers_decodes(name: str, block: tuple[int, int] | None, scale_dtype: torch.dtype,
                                         tmp_path: Path) -> None:  # fmt: skip
    """Blocks that divide the sizes: others transformers cuts otherwise than they were made."""
    plain = save_checkpoint(family(name), tmp_path)
    pack_folder(tmp_path, block, scale_dtype)
    decoded = transformers.FineGrainedFP8Config(weight_block_size=block, dequantize=True)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", quantization_config=decoded
    )
    with torch.inference_mode():
        want, unpacked = (model(torch.tensor([TOKENS])).logits[0] for model in (reference, plain))
    got = logits_of(load(tmp_path).model)
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()
    assert (unpacked - want).abs().max() > 1e-3 * want.abs().max(), "or nothing was packed"


@pytest.mark.parametrize("quant", ["none", "q8_0"])
def test_blocks_end_with_the_matrix(quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of DeepSeek's 576 rows the last block of 128 has 64. Read in pieces that end within blocks."""
    monkeypatch.setattr("quire.models.loading.shards.READ_ELEMENTS", 700)
    save_checkpoint(family("llama"), tmp_path)
    pack_folder(tmp_path, (24, 40))
    packed = load_file(tmp_path / "model.safetensors")
    scales = packed[f"{UP}_scale_inv"]
    assert tuple(scales.shape) == (4, 2) and packed[UP].shape == (96, 64)
    got = logits_of(load(tmp_path, quant=quant).model)
    for name in [name for name in packed if f"{name}_scale_inv" in packed]:
        scales = packed.pop(f"{name}_scale_inv").repeat_interleave(24, 0).repeat_interleave(40, 1)
        packed[name] = packed[name].float() * scales[: packed[name].shape[0], : packed[name].shape[1]]
    save_file(packed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    say(tmp_path, None)
    assert torch.equal(got, logits_of(load(tmp_path, quant=quant).model))


@pytest.mark.parametrize("block", [(16, 32), None])
def test_matrices_one_behind_the_other(block: tuple[int, int] | None, tmp_path: Path) -> None:
    stack = torch.randn(3, 40, 48, generator=torch.Generator().manual_seed(1))
    parts = [pack(matrix, block) for matrix in stack]
    scales = torch.stack([scale for _, scale in parts])
    tensors = {"x": torch.stack([packed for packed, _ in parts]), "x_scale_inv": scales if block else scales.flatten()}
    save_file(tensors, tmp_path / "model.safetensors")
    quantized = Quantization("FP8", find_floats(block))
    checkpoint = SafetensorsCheckpoint([tmp_path / "model.safetensors"], "here", quantized)
    got, one = torch.empty(3, 40, 48), torch.empty(40, 48)
    checkpoint.read("x", got)
    checkpoint.read("x", one, 2)
    assert (got - stack).abs().max() < 0.07 * stack.abs().max() and torch.equal(got[2], one)
    entry: PartSource = checkpoint.source("x").entry(1, 3)
    assert torch.equal(entry.read(17, 5), got[1, 17:22])


def test_names_that_others_give_them(tmp_path: Path) -> None:
    """The same factor under a shorter name, and scales for activations and caches, as AutoFP8 writes them."""
    save_checkpoint(family("llama"), tmp_path)
    pack_folder(tmp_path, None)
    want = logits_of(load(tmp_path).model)

    def rename(tensors: Scaled) -> None:
        for name in list(tensors):
            new = name.replace("weight_scale_inv", "weight_scale").replace("activation_scale", "input_scale")
            tensors[new] = tensors.pop(name)
        tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.5)

    edit(tmp_path, rename)
    assert "model.layers.0.self_attn.q_proj.input_scale" in load_file(tmp_path / "model.safetensors")
    assert torch.equal(logits_of(load(tmp_path).model), want)


def halve(tensors: Scaled) -> None:
    tensors[f"{UP}_scale_inv"] = tensors[f"{UP}_scale_inv"][:2].clone()


def round_off(tensors: Scaled) -> None:
    tensors[f"{UP}_scale_inv"] = tensors[f"{UP}_scale_inv"].to(torch.int8)


def flatten(tensors: Scaled) -> None:
    tensors[f"{UP}_scale_inv"] = tensors[f"{UP}_scale_inv"].flatten()


def no_scales(tensors: Scaled) -> None:
    del tensors[f"{UP}_scale_inv"]


def no_weight(tensors: Scaled) -> None:
    del tensors[UP]


@pytest.mark.parametrize(("change", "code", "words"), [
    (halve, "bad_weights", (f"{UP}_scale_inv", "[2, 2]", "blocks of 16 x 32", "[6, 2]")),
    (round_off, "bad_weights", (f"{UP}_scale_inv", "I8", "F32 or BF16")),
    (no_scales, "bad_weights", (UP, f"neither {UP}_scale_inv nor _scale")),
    (flatten, "bad_weights", (f"{UP}_scale_inv", "[12]", "[6, 2]")),
    (no_weight, "bad_weights", (UP, "lacks")),
])  # fmt: skip
def test_a_file_with_a_fault(change: Change, code: str, words: tuple[str, ...], tmp_path: Path) -> None:
    save_checkpoint(family("llama"), tmp_path)
    pack_folder(tmp_path, (16, 32))
    edit(tmp_path, change)
    with pytest.raises(QuireError) as error:
        load(tmp_path)
    assert error.value.code == code and all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("quantized", "code", "words"), [
    ({"quant_method": "fp8", "weight_block_size": [128]}, "bad_config", "weight_block_size"),
    ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "bad_config", "weight_block_size"),
    ({"quant_method": "fp8", "weight_block_size": "big"}, "bad_config", "weight_block_size"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "unsupported_model", "e5m2"),
    ({"quant_method": "hqq"}, "unsupported_model", "hqq"),
    ({"bits": 4}, "unsupported_model", "an unknown method"), ("fp8", "unsupported_model", "fp8"),
])  # fmt: skip
def test_a_config_with_a_fault(quantized: Any, code: str, words: str, tmp_path: Path) -> None:
    save_checkpoint(family("llama"), tmp_path)
    say(tmp_path, quantized)
    with pytest.raises(QuireError, match=words) as error:
        load(tmp_path)
    assert error.value.code == code and "\n" not in str(error.value)


def test_what_becomes_of_it_is_said(tmp_path: Path) -> None:
    save_checkpoint(family("llama"), tmp_path)
    pack_folder(tmp_path, (16, 32))
    with pytest.warns(UserWarning, match=r"is quantized \(FP8\); its weights are decoded to float32"):
        load(tmp_path)


@pytest.mark.parametrize(("method", "words"), [("fp8", "keeps linear layers and experts in FP8"),
                                               ("mxfp4", "keeps them in FP8, at half the size")])  # fmt: skip
def test_on_a_gpu_it_is_said_how_to_keep_it_smaller(method: str, words: str) -> None:
    files: Any = SimpleNamespace(name="it", config={}, vision_part=None)
    model: Any = SimpleNamespace(start_notes=tuple, modules=list)
    config = {"quantization_config": {"quant_method": method, "weight_block_size": [128, 128]}}
    for smaller in (True, False):
        notes = list_notes(model, files, config, "bfloat16", "none", smaller, False)
        assert "decoded to bfloat16" in "".join(notes)
        assert (f"`--quant fp8` {words}" in "".join(notes)) is smaller
    assert not list_notes(model, files, config, "bfloat16", "fp8", False, False)
    assert not list_notes(model, files, config, "float32", "none", False, True)


def test_fp8_is_offered_where_it_is_taken() -> None:
    cuda, model = torch.device("cuda"), torch.nn.Module()
    assert supports_fp8(model, cuda, "auto", False)
    assert not supports_fp8(model, CPU, "auto", False) and not supports_fp8(model, cuda, "torch", False)
    assert not supports_fp8(model, cuda, "auto", True)
    assert not supports_fp8(FallbackModel.__new__(FallbackModel), cuda, "auto", False)
