"""The deterministic mode on a GPU: a row's logits are the same bits alone, among others, in chunks, warm or cold,
pushed out and brought back, captured or not, and so are its draws. As `tests/cpu/test_deterministic.py`."""

from __future__ import annotations

import functools
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from quire.types import QuireError, Request, SamplingParams
from tests.cpu.bits import Logits, run, same, spied
from tests.cpu.families.harness import all_families, save_checkpoint
from tests.cpu.rig import load, make_request
from tests.cpu.tiny_models import make_tiny
from tests.gpu.script import DEVICE, ON_GPU, marks, run_file

pytestmark = marks()

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 64}),
    "qwen3": ("qwen3", {"head_dim": 128, "num_attention_heads": 8, "hidden_size": 256, "intermediate_size": 520}),
    "mistral": ("mistral", {"head_dim": 64, "num_key_value_heads": 1, "sliding_window": 40}),
    "real widths": (
        "qwen3",
        {"head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 1024, "vocab_size": 4096,
         "intermediate_size": 3072, "num_hidden_layers": 4, "max_position_embeddings": 8192},
    ),
    "real mixture": (
        "qwen3_moe",
        {"head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 4, "hidden_size": 2048, "vocab_size": 4096,
         "moe_intermediate_size": 768, "num_experts": 32, "num_experts_per_tok": 8, "num_hidden_layers": 3,
         "max_position_embeddings": 8192},
    ),
}  # fmt: skip
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 0.8, "top_p": 0.95, "seed": 8},
    {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.2, "presence_penalty": 0.5, "seed": 9},
)
NUM_ALONE = 12  # the rest are there to surround them


@functools.cache
def model(shape: str, dtype: str, page: int) -> Any:
    """`shape`: one of those above, or the name of a family of `tests/cpu/families`."""
    path = Path(tempfile.mkdtemp(prefix="quire-gpu-test-"))
    if shape in SHAPES:
        family, fields = SHAPES[shape]
        make_tiny(family, path, **fields)
    else:
        save_checkpoint(next(family for family in all_families() if family.name == shape), path)
    how = {"quant": "q8_0"} if shape == "gpt_oss" and not ON_GPU else {}  # sinks want the native kernels
    return load(path, page, DEVICE, dtype if ON_GPU else "auto", deterministic=True, **how)


def make_requests(count: int, longest: int, max_tokens: int, vocab: int, logprobs: int | None) -> list[Request]:
    """`logprobs`: with them no graph samples by itself, so that all logits are seen."""
    rng = random.Random(11)
    shared = [rng.randrange(3, vocab) for _ in range(longest // 2)]
    found = []
    for index in range(count):
        own = [rng.randrange(3, vocab) for _ in range(rng.randrange(1, longest // 2))]
        prompt = shared[: rng.choice((0, 0, longest // 5, longest // 2))] + own
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs, **PARAMS[index % len(PARAMS)]
        )
        found.append(make_request(f"r{index}", prompt, params))
    return found


def compare(shape: str, dtype: str, variants: dict[str, dict[str, Any]], *, count: int, longest: int, max_tokens: int,
            page: int = 16, **common: Any) -> None:  # fmt: skip
    tried = model(shape, dtype, page)
    vocab = tried.vocab_size
    keeps_states = any(spec.kind == "state" for spec in tried.specs)  # nobody's prompt is that long here
    common = {"device": DEVICE, "page_tokens": page, "deterministic": True, **common}

    def requests(logprobs: int | None = 2) -> list[Request]:
        return make_requests(count, longest, max_tokens, vocab, logprobs)

    engine, alone = spied(tried, **{**common, "prefix_cache": False, "graphs": False, "depth": 1})
    outputs: dict[str, list[int]] = {}
    for request in requests()[:NUM_ALONE]:
        outputs |= run(engine, [request])

    def check(found: dict[str, list[int]], seen: Logits, what: str) -> None:
        places = [place for place in alone if place in seen]
        same({place: seen[place] for place in places}, {place: alone[place] for place in places}, what)
        assert {name: found[name] for name in outputs} == outputs, what
        print(f"{shape}, {dtype}, pages of {page}: {what}: {len(places)} of {len(alone)} logits compared")

    for name, knobs in variants.items():
        knobs = dict(knobs)
        prepared, is_plain = knobs.pop("prepared", False), knobs.pop("plain", False)
        engine, seen = spied(tried, **{**common, "depth": 2, **knobs})
        if prepared:
            engine.prepare()
        logprobs = None if is_plain else 2
        check(run(engine, requests(logprobs)), seen, name)
        assert is_plain or alone.keys() <= seen.keys(), "with logprobs all are seen"
        if "num_pages" in knobs:
            assert engine.scheduler.stats.preemptions, f"{name}: the pool was meant to be too small"
        seen.clear()
        cold = engine.scheduler.cache.stats.hit_tokens
        check(run(engine, requests(logprobs)), seen, f"{name}, once more")
        assert keeps_states or "num_pages" in knobs or engine.scheduler.cache.stats.hit_tokens > cold + count, (
            "a warm prefix"
        )


def tiny(shape: str, dtype: str, num_pages: int = 14) -> None:
    """`num_pages`: too few for all rows that run."""
    variants: dict[str, dict[str, Any]] = {
        "all at once": {},
        "all at once, plain": {"plain": True},
        "depth 1, no graphs": {"depth": 1, "graphs": False},
        "chunks of 5": {"max_batch_tokens": 37, "chunk_tokens": 5},
        "swap": {"max_rows": 8, "num_pages": num_pages, "host_memory": 1 << 26, "preemption": "swap"},
        "recompute": {"max_rows": 8, "num_pages": num_pages, "preemption": "recompute", "depth": 1},
    }
    compare(shape, dtype, variants, count=32, longest=72, max_tokens=12, max_rows=32, max_batch_tokens=512)


def test_llama_in_float32() -> None:
    tiny("llama", "float32")


def test_llama_in_bfloat16() -> None:
    tiny("llama", "bfloat16")


def test_qwen3_in_float32() -> None:
    tiny("qwen3", "float32")


def test_qwen3_in_bfloat16() -> None:
    tiny("qwen3", "bfloat16")


def test_qwen3_in_float16() -> None:
    tiny("qwen3", "float16")


def test_mistral_in_float32() -> None:
    tiny("mistral", "float32", num_pages=10)  # pages before the window are given back


def test_mistral_in_bfloat16() -> None:
    tiny("mistral", "bfloat16", num_pages=10)  # pages before the window are given back


def test_mixture_in_float32() -> None:
    tiny("qwen2_moe", "float32")


def test_mixture_in_bfloat16() -> None:
    tiny("qwen3_moe", "bfloat16")


def test_mixture_by_groups_in_bfloat16() -> None:
    tiny("glm4_moe", "bfloat16")


def test_mixture_with_sinks_in_bfloat16() -> None:
    tiny("gpt_oss", "bfloat16")


def test_hybrid_of_delta_nets_in_float32() -> None:
    tiny("qwen3_next", "float32")


def test_hybrid_of_delta_nets_in_bfloat16() -> None:
    tiny("qwen3_5_moe_text", "bfloat16")


def test_hybrid_of_mambas_in_bfloat16() -> None:
    tiny("nemotron_h experts", "bfloat16")


def test_hybrid_of_convolutions_in_bfloat16() -> None:
    tiny("lfm2_moe", "bfloat16")


def test_hybrid_of_layers_beside_each_other_in_bfloat16() -> None:
    tiny("falcon_h1", "bfloat16")


def test_hybrid_with_scales_in_bfloat16() -> None:
    tiny("granitemoehybrid", "bfloat16")


def test_pages_of_the_default_size() -> None:
    """64 tokens; prompts are several of them long. `LONG` has requests pushed out, with such pages too."""
    variants: dict[str, dict[str, Any]] = {
        "all at once, plain": {"plain": True},
        "chunks of 23": {"max_batch_tokens": 150, "chunk_tokens": 23},
        "prepared": {"prepared": True},
    }
    for shape in ("qwen3", "mistral", "qwen3_moe", "gpt_oss", "qwen3_5_moe_text"):
        compare(shape, "bfloat16", variants, page=64, count=32, longest=288, max_tokens=12, max_len=400, max_rows=32,
                max_batch_tokens=512)  # fmt: skip


def prepared(shape: str, dtype: str) -> None:
    variants = {"prepared": {"prepared": True}, "prepared, plain": {"prepared": True, "plain": True}}
    compare(shape, dtype, variants, count=32, longest=72, max_tokens=12, max_rows=32, max_batch_tokens=512)


def test_prepared_graphs() -> None:
    """All captured ahead, mixed steps, too."""
    for dtype in ("float32", "bfloat16"):
        prepared("qwen3", dtype)


def test_mixture_prepared() -> None:
    prepared("qwen3_moe", "bfloat16")


def test_hybrid_prepared() -> None:
    prepared("qwen3_next", "bfloat16")


LONG = {"page": 64, "count": 20, "longest": 3400, "max_tokens": 12, "max_len": 4096, "max_rows": 20}
LONG_VARIANTS: dict[str, dict[str, Any]] = {
    "all at once": {"max_batch_tokens": 8192},
    "chunks of 700, no graphs": {"max_batch_tokens": 1024, "chunk_tokens": 700, "graphs": False},
    "chunks of 256": {"max_batch_tokens": 600, "chunk_tokens": 256},
    "chunks of 33, plain": {"max_batch_tokens": 100, "chunk_tokens": 33, "plain": True, "depth": 1},
}
LONG_PUSHED_OUT: dict[str, dict[str, Any]] = {
    "swap": {"num_pages": 80, "host_memory": 1 << 30, "preemption": "swap", "max_batch_tokens": 2048},
    "recompute": {"num_pages": 80, "preemption": "recompute", "max_batch_tokens": 2048},
    "prepared, plain": {"prepared": True, "plain": True, "max_batch_tokens": 2048},
}


def test_real_widths() -> None:
    if ON_GPU:
        compare("real widths", "bfloat16", LONG_VARIANTS, num_pages=1250, **LONG)


def test_mixture_of_real_widths() -> None:
    if ON_GPU:
        few = {name: LONG_VARIANTS[name] for name in ("all at once", "chunks of 256", "chunks of 33, plain")}
        compare("real mixture", "bfloat16", few, num_pages=1250, **LONG)


def test_real_widths_pushed_out() -> None:
    if ON_GPU:
        compare("real widths", "bfloat16", LONG_PUSHED_OUT, **{**LONG, "max_tokens": 64})


def test_real_widths_in_float32() -> None:
    if ON_GPU:
        few = {
            "all at once": {"max_batch_tokens": 8192},
            "chunks of 256": {"max_batch_tokens": 600, "chunk_tokens": 256},
        }
        compare("real widths", "float32", few, num_pages=5000, **{**LONG, "page": 16, "longest": 1500})


def test_what_it_can_not_do_is_refused() -> None:
    if not ON_GPU:
        return
    path = Path(tempfile.mkdtemp(prefix="quire-gpu-test-"))
    make_tiny("llama", path)
    for given in ({"quant": "fp8"}, {"kernels": "torch"}, {"kernels": "flash-attn"}):
        try:
            load(path, 16, DEVICE, "bfloat16", deterministic=True, **given)
        except QuireError as error:
            assert "deterministic mode does not support" in error.what
        else:
            raise AssertionError(given)


if __name__ == "__main__":
    run_file(globals(), *sys.argv[1:2])
