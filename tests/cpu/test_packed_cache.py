"""Packed KV caches: the native kernels write the bytes that the reference writes and attend as it does, a token's
numbers do not depend on its company, and the built-in model keeps its distribution.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM, QuireError, SamplingParams
from quire.bench import quality
from quire.cache.memory import unit_bytes
from quire.config import Config
from quire.config_build import override_config
from quire.kernels.angles import Angles, angle_tables
from quire.kernels.cache_forms import CACHE_FORMS, PackedPlane, packed_planes, parse_layers
from quire.kernels.native.library import ISAS
from quire.kernels.native.ops import NativeOps
from quire.kernels.reference import attention as reference_attention
from quire.kernels.reference import small_ops as reference
from quire.kernels.reference.packed_cache import read_packed, rotate, write_packed
from quire.models.loading.loader import build_model
from quire.runtime.reading import next_token_scores
from quire.runtime.store import CacheStore
from tests.cpu.native_isas import open_or_skip
from tests.cpu.tiny_llm import make_tiny_llm

SEED = int(os.environ.get("TEST_SEED", "7"))
CPU = torch.device("cpu")
FORMS = sorted(CACHE_FORMS)
HEADS = [(9, 3, 64), (4, 2, 32), (8, 2, 128), (6, 6, 96)]  # heads, KV heads, elements of a head
PAGE, PAGES, TOKENS = 16, 40, 300
MOST_KL = {"int8": 0.002, "k8v4": 0.01, "q4": 0.07}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(SEED)


def make_cache(name: str, kv_heads: int, head_dim: int) -> tuple[Tensor, PackedPlane, PackedPlane]:
    size = (1, 1, PAGES, PAGE, kv_heads, CACHE_FORMS[name].entry_bytes(head_dim))
    cache = torch.zeros(size, dtype=torch.uint8)
    k, v = packed_planes(cache, name)
    return cache, k, v


def test_rotation_keeps_products_and_undoes_itself() -> None:
    for size in (32, 64, 96, 128, 160):
        x, y = torch.randn(2, 3, size, dtype=torch.float64)
        torch.testing.assert_close(rotate(rotate(x)), x)
        torch.testing.assert_close((rotate(x) * rotate(y)).sum(-1), (x * y).sum(-1))
    spike = torch.zeros(64)
    spike[5] = 8.0
    assert rotate(spike).abs().amax() == 1.0, "a large element is spread over the head"


@pytest.mark.parametrize("name", FORMS)
def test_reading_gives_what_was_written_within_half_a_step(name: str) -> None:
    _, k_plane, v_plane = make_cache(name, 2, 64)
    k, v = torch.randn(2, 5, 2, 64) * torch.tensor([0.01, 30.0]).view(2, 1, 1, 1)
    slots = torch.tensor([3, 40, 7, 600, 0])
    write_packed(k, v, k_plane, slots)
    for plane, written in ((k_plane, k), (v_plane, v)):
        entries = plane.entries.view(-1, 2, plane.entries.shape[-1])[slots]
        want = rotate(written)
        steps = 127 if plane.bits == 8 else 7.5
        error = (read_packed(plane, entries) - want).abs().amax(-1)
        # Half a step, and what 16 bits of a scale and of a least value leave open.
        assert (error <= want.abs().amax(-1) * (0.5 / steps + 2**-8)).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMS)
def test_kernels_write_and_attend_as_the_reference(isa: str, name: str) -> None:
    ops = NativeOps(open_or_skip(isa))
    for heads, kv_heads, dim in HEADS:
        ours, k, v = make_cache(name, kv_heads, dim)
        theirs, k_want, v_want = make_cache(name, kv_heads, dim)
        qkv, positions = torch.randn(TOKENS, (heads + 2 * kv_heads) * dim), torch.arange(TOKENS)
        frequencies = 1e4 ** (-torch.arange(dim // 2) * 2 / dim)
        table = torch.randperm(PAGES)[: TOKENS // PAGE + 1].int().view(1, -1)
        slots = table[0][positions // PAGE].long() * PAGE + positions % PAGE
        angles = Angles(positions, frequencies, 1.0)
        q = ops.qk_norm_rope_write(qkv.clone(), None, None, 0.0, angles, k, v, slots, heads).contiguous()
        tables = angle_tables(positions, frequencies, 1.0, torch.float32)
        reference.qk_norm_rope_write(qkv.clone(), None, None, 0.0, tables, k_want, v_want, slots, heads)
        # Cosines may differ in the last bit, which moves a number across a rounding edge now and then.
        assert (ours != theirs).float().mean() < 1e-4, (heads, dim)

        for window, sinks in ((None, None), (70, torch.randn(heads))):
            plan = ops.plan_attention(table, positions, [TOKENS], [TOKENS], PAGE, window, torch.float32)
            whole = ops.paged_attention(q, k, v, plan, dim**-0.5, None, sinks)
            slow = reference_attention.plan_attention(table, positions, [TOKENS], [TOKENS], PAGE, window, torch.float32)
            want = reference_attention.paged_attention(q, k, v, slow, dim**-0.5, None, sinks)
            torch.testing.assert_close(whole, want, rtol=1e-3, atol=1e-3)
            for last in (TOKENS, 130, 1):
                alone = ops.plan_attention(table, positions[last - 1 : last], [1], [last], PAGE, window, torch.float32)
                got = ops.paged_attention(q[last - 1 : last], k, v, alone, dim**-0.5, None, sinks)
                assert torch.equal(got[0], whole[last - 1]), "the same bits alone and in company"


@pytest.mark.parametrize("name", FORMS)
def test_what_is_not_finite_stays_so(native: Any, name: str) -> None:
    ops = NativeOps(native)
    for bad in (torch.nan, torch.inf):
        for column in (5, 2 * 32 + 5, 3 * 32 + 5):  # of a query, a key, a value
            _, k, v = make_cache(name, 1, 32)
            qkv = torch.randn(1, 4 * 32)
            qkv[0, column] = bad
            position = torch.zeros(1, dtype=torch.int64)
            q = ops.qk_norm_rope_write(qkv, None, None, 0.0, Angles(position, torch.ones(16), 1.0), k, v, position, 2)
            table = torch.zeros(1, 1, dtype=torch.int32)
            plan = ops.plan_attention(table, position, [1], [1], PAGE, None, torch.float32)
            assert not ops.paged_attention(q, k, v, plan, 1.0).isfinite().all()


def test_layers_are_named_by_numbers_and_ranges() -> None:
    assert parse_layers("0, 28-29", 30) == {0, 28, 29}
    assert parse_layers("", 30) == set()
    for text in ("30", "2-1", "a", "-1", "0-30"):
        with pytest.raises(QuireError, match="no layer or range of layers from 0 to 29"):
            parse_layers(text, 30)


LLAMA = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

LATENT = {
    "model_type": "deepseek_v2",
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "first_k_dense_replace": 4,
    "n_routed_experts": 8,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}


def build(config: dict[str, Any], **settings: Any) -> Any:
    device = torch.device(settings.pop("device", "cpu"))
    return build_model(config, dtype="auto", device=device, page_tokens=16, **settings)[0]


def test_layers_that_stay_whole_are_a_group_of_their_own() -> None:
    packed, whole = build(LLAMA, kv_dtype="k8v4", kv_skip="0,3").specs
    assert (packed.layers, packed.packing, packed.dtype, packed.shape) == ((1, 2), "k8v4", "uint8", (2, 34 + 20))
    assert (whole.layers, whole.packing, whole.dtype, whole.shape) == ((0, 3), "", "float32", (2, 32))
    (only,) = build(LLAMA, kv_dtype="q4", kv_skip="0-3").specs
    assert only.packing == "" and only.group == "full"


@pytest.mark.parametrize(
    ("change", "settings", "problem"),
    [
        ({"head_dim": 20}, {"kv_dtype": "int8"}, "needs heads of a multiple of 32 elements, not of 20"),
        ({}, {"kv_dtype": "q4", "kv_skip": "4"}, "'4', which is no layer or range of layers from 0 to 3"),
        ({}, {"kv_skip": "1"}, "names layers that are not packed"),
        ({}, {"kv_dtype": "int8", "device": "mps"}, "needs a CPU or a CUDA device"),
        (LATENT, {"kv_dtype": "int8"}, "does not cover latent attention"),
    ],
)
def test_a_cache_that_can_not_be_packed(change: dict[str, Any], settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(QuireError, match=problem) as caught:
        build(LLAMA | change, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", FORMS)
def test_memory_is_as_planned(name: str) -> None:
    (floats,), (packed,) = build(LLAMA).specs, build(LLAMA, kv_dtype=name).specs
    store = CacheStore([packed], [50], None, CPU)
    assert store.tensors["full"].nbytes == 50 * unit_bytes(packed)
    assert unit_bytes(floats) / unit_bytes(packed) > {"int8": 3.7, "k8v4": 4.7, "q4": 6.3}[name]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_generation_with_evictions_and_prefix_hits(tmp_path: Path, kernels: str) -> None:
    """A small cache preempts and swaps; pages move whole, so that tokens are those of a large cache."""
    folder = make_tiny_llm(tmp_path, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    prompts = [f"why is the sky blue {'scattered ' * n}" for n in range(1, 7)] * 2
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    start = partial(LLM, str(folder), kv_dtype="q4", max_model_len=128, kernels=kernels)
    if kernels == "auto":
        open_or_skip("portable")  # else torch runs, whose numbers depend on company
        start = partial(start, kv_dtype_skip="0", deterministic=True, preemption="swap")
    else:
        # Torch's numbers depend on a token's company, and rounding makes whole steps of last bits.
        start = partial(start, max_rows=1, prefix_cache=False)
    found = [[output.token_ids for output in start(num_pages=pages).generate(prompts, params)] for pages in (None, 24)]
    assert found[0] == found[1]


def test_the_built_in_model_keeps_its_distribution() -> None:
    try:
        plain = quality._load(Config())
    except QuireError as error:
        pytest.skip(f"the built-in model can't be had here: {error}")
    from quire.startup.cache_plan import find_files
    from quire.text.loading import load_tokenizer

    tokenizer = load_tokenizer(find_files(Config(), None))
    assert tokenizer is not None
    tokens = tokenizer.encode(Path("docs/glossary.md").read_text("utf-8"))[:385]
    want = [scores.clone() for scores, _ in next_token_scores(plain, tokens)]
    found = {}
    for name in FORMS:
        model = quality._load(override_config(Config(), {"kv_dtype": name}))
        pairs = zip(want, next_token_scores(model, tokens), strict=True)
        losses = [(exact.exp() * (exact - got)).sum(-1) for exact, (got, _) in pairs]
        found[name] = torch.cat(losses).mean().item()
    assert all(0 < found[name] < MOST_KL[name] for name in FORMS), found
    assert found["int8"] < found["k8v4"] < found["q4"]
