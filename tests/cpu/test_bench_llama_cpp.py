"""`quire bench compare-llama-cpp` where llama.cpp is not installed, and the parts of it that need no llama.cpp."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.bench.llama_cpp import QuireSide, bench_llama_cpp, draw_prompts, file_form, requantize
from quire.files.gguf import open_gguf
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
