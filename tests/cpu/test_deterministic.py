"""The deterministic mode: a row's logits are the same bits alone, among others, in chunks, warm or cold, pushed out and
brought back, and gone on with by another engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from quire.engine.loop import Engine
from quire.files.source import resolve_model
from quire.kernels.activations import CURVES, Curve
from quire.kernels.angles import angle_tables
from quire.kernels.deterministic import dense as fixed
from quire.kernels.deterministic import experts as fixed_experts
from quire.kernels.expert_types import ExpertWeights, GatedActivation, Routing
from quire.kernels.native.library import FORMS, unit_columns
from quire.kernels.native.matrix import PackedLinear
from quire.kernels.native.ops import NativeOps
from quire.kernels.reference import attention as reference_attention
from quire.kernels.reference import experts as reference_experts
from quire.kernels.reference import small_ops as reference
from quire.kernels.table import DETERMINISTIC, select_choice
from quire.models.loading.deterministic_support import TORCH_KINDS, kind_of, select_deterministic_ops
from quire.models.loading.loader import load_model
from quire.models.model import Model
from quire.sampling.noise import Noise
from quire.sampling.sampler import Sampler
from quire.types import QuireError, Request, SamplingParams
from tests.cpu.bits import Logits, as_bits, run, same, spied
from tests.cpu.families.harness import all_families, model_type, save_checkpoint
from tests.cpu.native_isas import open_or_skip
from tests.cpu.rig import CPU, make_request
from tests.cpu.sampling_cases import Case, resolved, set_up
from tests.cpu.test_native_products import make_matrix
from tests.cpu.tiny_models import FAMILIES as TINY_FAMILIES
from tests.cpu.tiny_models import make_tiny

SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=10, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
NUM_ALONE = 10  # of the 32: the rest are there to surround them


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Three do not divide what they share out evenly: where one part ends lies somewhere inside a row."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


KINDS = [
    ("llama", 1, {"kernels": "torch"}),
    ("mistral", 2, {"kernels": "torch"}),
    ("qwen3", 3, {"kernels": "torch"}),
    ("llama", 3, {}),  # the native kernels, where they are built
    ("mistral", 2, {"quant": "q8_0"}),
    ("qwen3", 1, {"quant": "q4_0"}),
    ("llama", 2, {"quant": "q4_0", "deterministic": False}),  # they are of that kind in the default mode, too
    ("qwen2_moe", 3, {"kernels": "torch"}),
    ("deepseek_v3", 2, {"kernels": "torch"}),
    ("qwen3_next", 1, {"kernels": "torch"}),
    ("nemotron_h experts", 3, {"kernels": "torch"}),
    ("gpt_oss", 3, {"quant": "q4_0"}),  # op by op
    ("qwen3_5_moe_text", 2, {"quant": "q8_0"}),
]


@pytest.fixture(scope="module", params=KINDS, ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """With a number of threads each, set for all that is computed with it."""
    family, num_threads, own = request.param
    if own.get("kernels") != "torch":
        need_native()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    yield load_fixed(family, Path(tmp_path_factory.mktemp("model")), **own)
    torch.set_num_threads(before)


def load_fixed(family: str, folder: Path, **own: Any) -> Model:
    if family in TINY_FAMILIES:
        make_tiny(family, folder)
    else:
        save_checkpoint(next(other for other in all_families() if other.name == family), folder)
    options: dict[str, Any] = {"dtype": "auto", "device": CPU, "max_model_len": None, "page_tokens": 4, **own}
    return load_model(resolve_model(str(folder)), **{"deterministic": True, **options}).model


def need_native() -> None:
    from quire.kernels.native.library import NotBuilt, load_library

    try:
        load_library()
    except NotBuilt as error:
        pytest.skip(str(error))


def make_requests(rng: random.Random, count: int) -> list[Request]:
    shared = [rng.randrange(250) for _ in range(24)]
    found = []
    for index in range(count):
        own = [rng.randrange(250) for _ in range(rng.randrange(1, 36))]
        prompt = shared[: rng.choice((0, 0, 9, 24))] + own
        found.append(make_request(f"r{index}", prompt, GREEDY if index % 2 else SAMPLED))
    return found


def test_the_same_bits_whatever_surrounds_a_row(model: Model) -> None:
    compare(model)


LATENT = [family.name for family in all_families() if kind_of(model_type(family)) == "latent"]
COVERED = [family.name for family in all_families() if kind_of(model_type(family)) in TORCH_KINDS]


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["none", "q8_0"])
@pytest.mark.parametrize("family", COVERED)
def test_the_same_bits_for_every_mixture_latent_and_hybrid(family: str, quant: str, tmp_path: Path) -> None:
    if quant != "none":
        need_native()
        if family in LATENT:
            pytest.skip("refused")
    how = {"kernels": "torch"} if quant == "none" else {"quant": quant}
    compare(load_fixed(family, tmp_path, **how))


def compare(model: Model) -> None:
    pages = any(spec.kind == "paged" for spec in model.specs)
    small = {"max_rows": 8, "max_batch_tokens": 64, "num_pages": 24, "host_memory": 1 << 22}
    prefixes = all(spec.kind == "paged" for spec in model.specs)  # a state is kept every thousand tokens
    make: Callable[[], list[Request]] = lambda: make_requests(random.Random(11), 32)  # noqa: E731
    outputs: dict[str, list[int]] = {}
    engines: list[tuple[Engine, Logits]] = []
    engine, alone = spied(model, prefix_cache=False)
    for request in make()[:NUM_ALONE]:
        outputs |= run(engine, [request])
    for knobs in (
        {"max_rows": 32, "max_batch_tokens": 512},  # all at once, prefixes shared
        {"max_rows": 32, "max_batch_tokens": 37, "chunk_tokens": 5},  # prompts in small chunks
        {**small, "host_cache": False},  # swapped out and in
        {**small, "host_cache": False, "preemption": "recompute"},
        small,  # prefixes come back from host memory
    ):
        engine, seen = spied(model, **knobs)
        engines.append((engine, seen))
        found = run(engine, make())
        assert {name: found[name] for name in outputs} == outputs
        same({place: seen[place] for place in alone}, alone)
        if "host_cache" in knobs and pages:
            assert engine.scheduler.stats.preemptions, "the pool was meant to be too small"
    engine, seen = engines[0]  # which has kept them all
    seen.clear()
    cold = engine.scheduler.cache.stats.hit_tokens
    found = run(engine, make())
    assert engine.scheduler.cache.stats.hit_tokens > cold + 100 or not prefixes, "a warm prefix"
    assert {name: found[name] for name in outputs} == outputs
    same({place: seen[place] for place in alone}, alone)


def test_the_same_bits_where_the_number_of_keys_changes(model: Model) -> None:
    prompt = [(7 * place) % 250 for place in range(121)]
    results = []
    for knobs in ({}, {"max_batch_tokens": 16, "chunk_tokens": 7}, {"max_batch_tokens": 16, "chunk_tokens": 3}):
        engine, seen = spied(model, max_rows=16, **knobs)
        requests = [make_request("a", prompt, GREEDY), make_request("b", prompt * 2, GREEDY)]
        run(engine, requests)
        results.append(seen)
    assert {length for name, length in results[0] if name == "a"} >= {127, 128, 129}
    for seen in results[1:]:
        same(seen, results[0])


def test_another_engine_goes_on_with_the_same_bits(model: Model) -> None:
    engine, whole = spied(model)
    expected = run(engine, make_requests(random.Random(5), 8))
    rng = random.Random(6)
    resumed = make_requests(random.Random(5), 8)
    for request in resumed:
        request.tokens += expected[request.id][: rng.randrange(1, 5)]
        request.resumed, request.suspect = True, rng.random() < 0.5
    engine, seen = spied(model)
    assert run(engine, resumed) == expected
    same(seen, {place: whole[place] for place in seen})


def test_natively_the_number_of_threads_does_not_matter(tmp_path: Path) -> None:
    need_native()
    files = resolve_model(str(make_tiny("llama", tmp_path)[1]))
    options: dict[str, Any] = {"dtype": "auto", "device": CPU, "max_model_len": None, "page_tokens": 4, "quant": "q8_0"}
    before, results = torch.get_num_threads(), []
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        engine, seen = spied(load_model(files, **options, deterministic=True).model)
        torch.set_num_threads(before)
        run(engine, make_requests(random.Random(3), 8))
        results.append(seen)
    same(*results)


def assert_gated(found: torch.Tensor, plain: torch.Tensor, curve: Curve) -> None:
    """Within eight roundings of what is exact. A curve may be the gate times a difference of two that are nearly alike,
    of which processors make other last bits: what was lost there is a part of the gate, not of the result."""
    exact = reference.gate_mul(plain.double(), curve)
    gate, up = plain.double().chunk(2, dim=-1)
    assert ((found - exact).abs() <= 2**-21 * torch.maximum((gate * up).abs(), exact.abs())).all(), curve


def test_ops_agree_with_the_reference(threads: int) -> None:
    torch.manual_seed(3)
    linear = fixed.TiledLinear()
    for rows in (1, 5, 16, 17, 40):
        x, weight, norm = torch.randn(rows, 48), torch.randn(96, 48), torch.randn(48)
        residual = torch.randn(rows, 96)
        expected = functional.linear(reference.rms_norm(x, norm, 1e-5), weight)
        torch.testing.assert_close(linear.run(x, weight, None, norm, 1e-5, None, residual.clone()), expected + residual)
        plain = linear.run(x, weight, None, norm, 1e-5, None, None)
        for curve in CURVES:
            assert_gated(linear.run(x, weight, None, norm, 1e-5, curve, None), plain, curve)
            assert_gated(fixed.gate_mul(plain, curve), plain, curve)
            assert_gated(reference.gate_mul(plain, curve), plain, curve)
    positions, frequencies = torch.arange(50), torch.rand(8)
    ours, theirs = (f(positions, frequencies, 1.5, torch.float32) for f in (fixed.plan_angles, angle_tables))
    torch.testing.assert_close(ours.cos, theirs.cos)
    torch.testing.assert_close(ours.sin, theirs.sin)


@pytest.mark.parametrize("window", [None, 7, 600])
def test_attention_agrees_with_the_reference(window: int | None) -> None:
    """Also where whole blocks of keys lie before the window."""
    torch.manual_seed(4)
    page_tokens, num_pages = 16, 200
    k_cache, v_cache = torch.randn(2, num_pages, page_tokens, 2, 16)
    counts, lengths = [1, 7, 1, 4, 1], [3, 40, 1300, 900, 513]
    table = torch.randperm(num_pages - 1)[: 5 * 90].repeat(3)[: 5 * 90].view(5, 90).int() + 1
    positions = torch.cat([torch.arange(end - count, end) for count, end in zip(counts, lengths, strict=True)])
    q = torch.randn(sum(counts), 6, 16)
    results = []
    for room in (fixed, reference_attention):
        plan = room.plan_attention(table, positions, counts, lengths, page_tokens, window, torch.float32)
        results.append(room.paged_attention(q, k_cache, v_cache, plan, 0.25))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("function", [torch.sigmoid, functional.silu, functional.softplus, torch.tanh])
def test_an_element_is_the_same_wherever_it_stands(function: Callable[[Tensor], Tensor], threads: int) -> None:
    torch.manual_seed(8)
    x = torch.randn(70_001)
    whole = fixed.elementwise(lambda x: function(x), x)
    torch.testing.assert_close(whole, function(x))
    for first, size in ((0, 1), (1, 15), (3, 33), (64, 100), (7, 4099), (5, 69_000)):
        got = fixed.elementwise(lambda x: function(x), x[first : first + size])
        assert torch.equal(as_bits(got), as_bits(whole[first : first + size])), (first, size)
    columns = fixed.elementwise(torch.add, x[:300].view(100, 3)[:, :2], x[:100].view(100, 1))
    assert torch.equal(columns, x[:300].view(100, 3)[:, :2] + x[:100].view(100, 1))


@pytest.mark.parametrize("activation", [GatedActivation(1.702, 1.0, 0.7), GatedActivation(curve="gelu_tanh")],
                         ids=["clamped", "gelu"])  # fmt: skip
def test_experts_agree_with_the_reference(activation: GatedActivation) -> None:
    torch.manual_seed(9)
    gate_up, down = torch.randn(5, 48, 40) * 40**-0.5, torch.randn(5, 40, 24) * 24**-0.5
    experts = ExpertWeights(gate_up, down, torch.randn(5, 48), torch.randn(5, 40), activation)
    routing = Routing(5, 2, "sigmoid", scale=1.5)
    scale = torch.randn(5)
    for rows in (1, 16, 45):
        stream, parts = torch.randn(rows, 40), (torch.randn(40), 1e-5, torch.randn(5, 40), None, torch.randn(5))
        results = []
        for room in (fixed_experts, reference_experts):
            x, chosen, shares = room.norm_route(stream, *parts, routing, scale)
            results.append((chosen, shares, room.run_experts(x, experts, chosen, shares, stream)))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_what_it_can_not_do_is_refused(tmp_path: Path) -> None:
    files = resolve_model(str(make_tiny("llama", tmp_path)[1]))
    options: dict[str, Any] = {"device": CPU, "max_model_len": None, "page_tokens": 4, "deterministic": True}
    for name, given in (("dtype", "float16"), ("quant", "q8_0")):
        with pytest.raises(QuireError, match=f"deterministic mode does not support --{name} {given}"):
            load_model(files, **{"dtype": "auto", "kernels": "torch", **options, name: given})


@pytest.mark.parametrize("family", ["gpt_oss", "granite_swa", "granitemoe_swa", "gemma4_text", "gptj"])
def test_models_it_does_not_cover_are_refused(family: str) -> None:
    """By torch alone: sinks; a family of its own; what transformers' code runs."""
    with pytest.raises(QuireError, match="deterministic mode does not cover"):
        select_deterministic_ops(
            family,
            fits_native=False,
            in_blocks=False,
            device_type="cpu",
            dtype="auto",
            quant="none",
            kernels="torch",
        )


@pytest.mark.parametrize(("change", "said"), [({"quant": "fp8"}, "not support --quant fp8 on CUDA"),
                                              ({"kv_dtype": "fp8"}, "not support --kv-dtype fp8 on CUDA"),
                                              ({"model_type": "deepseek_v3"}, "not cover deepseek_v3 models on CUDA"),
                                              ({"model_type": "gptj"}, "not cover gptj models on CUDA")])  # fmt: skip
def test_what_it_can_not_do_on_cuda_is_refused(change: dict[str, str], said: str,
                                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr("quire.models.loading.deterministic_support.deterministic_ops", lambda *args: DETERMINISTIC)
    ask: dict[str, Any] = {"model_type": "qwen3", "fits_native": True, "in_blocks": False, "device_type": "cuda",
                           "dtype": "auto", "quant": "none", "kernels": "auto"}  # fmt: skip
    assert select_deterministic_ops(**ask) is DETERMINISTIC
    with pytest.raises(QuireError, match=said):
        select_deterministic_ops(**{**ask, **change})


@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 300, 700])
def test_natively_a_token_sees_its_keys_alike_alone_and_in_a_chunk(window: int | None, has_sinks: bool,
                                                                   isa: str) -> None:  # fmt: skip
    """Also where one token's keys are shared by threads and a chunk's are not: around the ends of pieces of 512."""
    ops = NativeOps(open_or_skip(isa))
    torch.manual_seed(5)
    k_cache, v_cache = torch.randn(2, 160, 16, 2, 24)
    table, q = torch.randperm(159)[:140].view(1, 140).int() + 1, torch.randn(56, 6, 24)
    sinks = torch.randn(6) if has_sinks else None

    def attend(first: int, count: int, place: int) -> Tensor:
        plan = ops.plan_attention(table, torch.arange(first, first + count), [count], [first + count], 16, window,
                                  torch.float32)  # fmt: skip
        return ops.paged_attention(q[place : place + count], k_cache, v_cache, plan, 0.25, sinks=sinks)

    for start in (0, 480, 1000, 2020):
        whole = attend(start, 56, 0)
        for size in (1, 2, 5):
            parts = [attend(start + place, min(size, 56 - place), place) for place in range(0, 56, size)]
            assert torch.equal(torch.cat(parts).view(torch.int32), whole.view(torch.int32)), (start, size)


@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
def test_natively_a_product_is_the_same_for_a_token_alone_and_among_others(isa: str) -> None:
    native = open_or_skip(isa)
    torch.manual_seed(6)
    for form in FORMS:
        columns = max(96, unit_columns(form))
        linear = PackedLinear([make_matrix(native, form, 37, columns)[0]], torch.randn(37))
        x = torch.randn(35, columns) * torch.logspace(-3, 3, 35)[:, None]
        whole = linear(x)
        for size in (1, 2, 3, 7):
            parts = torch.cat([linear(x[first : first + size]) for first in range(0, 35, size)])
            assert torch.equal(parts.view(torch.int32), whole.view(torch.int32)), (form, size)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_row_draws_the_same_token_whatever_its_neighbours_ask_for(kernels: str) -> None:
    """Its noise is the same to the last bit, also beside rows with filters and edits: here all tokens are tied."""
    vocab, params = 500, [{"temperature": 1.0}, {"top_p": 0.9}, {"presence_penalty": 1.0}, {"top_k": 20}]
    sampler, noise = Sampler(vocab, "cpu", None, select_choice("cpu", kernels)), Noise(vocab, "cpu")
    for length in range(1, 40):
        cases = [Case(resolved(**{"temperature": 1.0, **asked}), list(range(length)), seed=3) for asked in params]
        tokens = []
        for count in (1, 4):
            batch, histories = set_up(cases[:count], vocab)
            assert batch.draws is not None
            logits = -noise.gumbel(batch.draws.key, histories.lengths)
            tokens.append(int(sampler.sample(logits, batch, histories).tokens[0]))
        assert tokens[0] == tokens[1]
