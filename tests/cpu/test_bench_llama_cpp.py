"""`quire bench compare-llama-cpp` where llama.cpp is not installed, and the parts of it that need no llama.cpp."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.bench.llama_cpp import QuireSide, _byte_floor, bench_llama_cpp, draw_prompts, file_form, requantize
from quire.bench.random_gguf import MIXTURES, SHAPES, RandomShape, make_random_gguf
from quire.files.gguf import open_gguf
from quire.files.source import resolve_model
from quire.types import QuireError
from tests.cpu.rig import load, make_engine
from tests.cpu.tiny_gguf import write_gguf
from tests.cpu.tiny_models import make_tiny


def test_without_llama_cpp_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(QuireError, match=r"llama\.cpp is not installed") as error:
        bench_llama_cpp(lambda *args, **knobs: None, tmp_path / "m.gguf", tmp_path, threads=1)  # type: ignore[arg-type, return-value]
    assert "llama-cpp-python" in error.value.hint


def test_a_file_is_written_again_in_another_form(tmp_path: Path) -> None:
    reference, _ = make_tiny("smollm2", tmp_path)
    types = {r"blk.*(attn|ffn)_(q|k|v|output|gate|up|down)\.weight": "Q4_1", "token_embd.weight": "Q8_0"}
    write_gguf(reference, "llama", tmp_path / "a.gguf", types=types)
    requantize(tmp_path / "a.gguf", tmp_path / "b.gguf", "Q4_0")
    assert (file_form(tmp_path / "a.gguf"), file_form(tmp_path / "b.gguf")) == ("Q4_1", "Q4_0")
    old, new = open_gguf(tmp_path / "a.gguf"), open_gguf(tmp_path / "b.gguf")
    assert old.metadata == new.metadata
    assert new.tensors["token_embd.weight"].type.name == "Q8_0"
    assert new.tensors["output_norm.weight"].type.name == "F32"


TINY = RandomShape(3, 256, 4, 2, 64, 512)
TINY_MOE = RandomShape(3, 256, 4, 2, 64, 256, num_experts=4, top_k=2, arch="qwen3moe", qk_norm=True, tied=False)


@pytest.fixture
def tokenizer() -> Path:
    try:
        return resolve_model("smollm2").path
    except QuireError as error:
        pytest.skip(f"the built-in model can't be had here: {error}")


@pytest.mark.parametrize("mixture", ["Q4_K_M", "IQ4_XS"])
def test_a_file_of_random_weights_has_its_shape_and_runs(
    tmp_path: Path, tokenizer: Path, mixture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = TINY_MOE if mixture == "Q4_K_M" else TINY
    monkeypatch.setitem(SHAPES, "tiny", shape)
    path = tmp_path / "tiny.gguf"
    make_random_gguf("tiny", mixture, tokenizer, path)
    most, sensitive, _ = MIXTURES[mixture]
    file = open_gguf(path)
    ending = "_exps.weight" if shape.num_experts else ".weight"
    assert file.tensors["blk.1.attn_q.weight"].type.name == most
    assert {file.tensors[f"blk.{layer}.ffn_down{ending}"].type.name for layer in range(3)} <= {most, sensitive}
    floor = _byte_floor(path, 1, lambda line: None)
    experts = sum(tensor.data.nbytes for name, tensor in file.tensors.items() if "_exps" in name)
    every = sum(tensor.data.nbytes for tensor in file.tensors.values())
    skipped = 0 if shape.tied else file.tensors["token_embd.weight"].data.nbytes
    assert floor["token_bytes"] == pytest.approx(every - skipped - experts / 2, abs=1)
    with LLM(str(path), max_model_len=64) as llm:
        (output,) = llm.generate(["The sky"], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    assert len(output.token_ids) == 4


def test_an_unknown_shape_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(QuireError, match="no shape 9b in Q4_K_M") as error:
        make_random_gguf("9b", "Q4_K_M", tmp_path / "a.gguf", tmp_path / "b.gguf")
    assert "0.8b, 3b, 8b" in error.value.hint and "Q4_K_M" in error.value.hint


class _LLM:
    """What `QuireSide` needs of an LLM, around a tiny model."""

    def __init__(self, engine: Any):
        self.engine = engine
        self.edge = self

    def requests(self, prompt: list[int], params: Any) -> list[Any]:
        from tests.cpu.rig import make_request

        self.count = getattr(self, "count", 0) + 1
        return [make_request(f"r{self.count}", prompt, params)]


def test_our_side_counts_from_the_moment_all_streams_have_a_token(tmp_path: Path) -> None:
    torch.manual_seed(0)
    _, folder = make_tiny("llama", tmp_path)
    tokens, timing = QuireSide(_LLM(make_engine(load(folder)))).run(draw_prompts(3, 9, 256, seed=1), 5)  # type: ignore[arg-type]
    assert [len(each) for each in tokens] == [5, 5, 5]
    assert timing.first_token_s > 0 and timing.decode_tps > 0
