"""Compile the kernels for Hopper on a machine without a GPU and print a JSON object: kernel -> bytes of code.

`tests/cpu/test_triton_compile.py` starts this. The wrappers run with tensors on the CPU and a driver that only knows
its target; launches compile and stop there. It also covers what the interpreter can't: bfloat16, and Gluon, with the
Triton that is known to have ours.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from quire.kernels.angles import Angles
from quire.kernels.cache_forms import CACHE_FORMS, packed_planes
from quire.kernels.expert_types import ExpertWeights, GatedActivation, Routing
from quire.kernels.four_bits import FourBits
from quire.kernels.recurrent_types import ConvShape, ConvWeights, DeltaWeights, MambaWeights, RecurrentShape
from quire.kernels.triton import launch
from quire.kernels.triton.attention import decode, prefill_hopper, prefill_split
from quire.kernels.triton.attention import deterministic_tiles as fixed_tiles
from quire.kernels.triton.attention import packed as packed_attention
from quire.kernels.triton.attention import paged as attention
from quire.kernels.triton.attention import rope_write as rope
from quire.kernels.triton.experts import deterministic as fixed_experts
from quire.kernels.triton.experts import experts, route
from quire.kernels.triton.experts import few_tokens as experts_few
from quire.kernels.triton.latent import latent
from quire.kernels.triton.latent import many_heads as latent_many
from quire.kernels.triton.latent import per_head as latent_heads
from quire.kernels.triton.linear import deterministic as fixed_linear
from quire.kernels.triton.linear import four_bits, fp8, gated_hopper, norm, skinny
from quire.kernels.triton.recurrent import channel_delta as recurrent_channel
from quire.kernels.triton.recurrent import channel_step as recurrent_channel_step
from quire.kernels.triton.recurrent import deterministic as fixed_recurrent
from quire.kernels.triton.recurrent import recurrent
from quire.kernels.triton.recurrent import scan as recurrent_scan
from quire.kernels.triton.recurrent import short_conv as recurrent_short
from quire.kernels.triton.recurrent import step as recurrent_step
from quire.kernels.triton.recurrent.hopper import channel_delta as channel_walk
from quire.kernels.triton.recurrent.hopper import gated_delta as recurrent_walk
from quire.kernels.triton.recurrent.hopper import mamba as mamba_walk
from quire.kernels.triton.sampling import deterministic as fixed_sampling
from quire.kernels.triton.sampling import edits as sample_edits
from quire.kernels.triton.sampling import filters as sample_filters
from quire.kernels.triton.sampling import logprobs as sample_logprobs
from quire.kernels.triton.sampling import sample

GLUON = triton.__version__.startswith(launch.KNOWN_GLUON)
launched: dict[str, int] = {}
variants: dict[str, set[str]] = {}
_run = JITFunction.run


class HopperDriver:
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    kernel = _run(self, *args, grid=grid, warmup=True, **kwargs)
    launched[self.__name__] = len(kernel.asm["cubin"])
    variants.setdefault(self.__name__, set()).add(kernel.hash)
    return kernel


def compile_packed(qkv: torch.Tensor, angles: Angles, table: torch.Tensor, places: torch.Tensor) -> None:
    for name, form in CACHE_FORMS.items():
        entries = torch.zeros(1, 1, 10, 64, 8, form.entry_bytes(128), dtype=torch.uint8)
        k, v = packed_planes(entries, name)
        q = packed_attention.qk_norm_rope_write(qkv, None, None, 1e-6, angles, k, v, places, 32)
        for counts in ([1] * 4, [4]):
            plan = packed_attention.plan_attention(table, places, counts, [4] * len(counts), 64, None, q.dtype)
            packed_attention.paged_attention(q, k, v, plan, 0.1)


def main() -> None:
    driver.set_active(HopperDriver())
    JITFunction.run = compile_only
    torch.Tensor.pin_memory = lambda self: self  # type: ignore[method-assign]
    for module in (launch, attention, channel_walk, decode, fixed_linear, fixed_tiles, gated_hopper, latent,
                   latent_many, mamba_walk, prefill_split, recurrent_channel_step, recurrent_scan, recurrent_step,
                   recurrent_walk, sample):  # fmt: skip
        for name, value in (("has_dependent_launch", True), ("supports_gluon", GLUON), ("num_multiprocessors", 132)):
            if hasattr(module, name):
                setattr(module, name, lambda index, value=value: value)
    bf16 = torch.bfloat16
    cache = torch.zeros(10, 64, 8, 128, dtype=bf16)
    table = torch.zeros(4, 64, dtype=torch.int32)
    places = torch.arange(4)
    qkv, weight = torch.zeros(4, 48 * 128, dtype=bf16), torch.zeros(128, dtype=bf16)
    angles = Angles(places, torch.rand(64))
    q = rope.qk_norm_rope_write(qkv, weight, weight, 1e-6, angles, cache, cache, places, 32)
    for counts in ([1] * 4, [4]):
        plan = attention.plan_attention(table, places, counts, [1024] * len(counts), 64, None, bf16)
        attention.paged_attention(q, cache, cache, plan, 0.1)
    assert prefill_hopper.supports(q, cache, plain=True)
    compile_fixed(q, cache, table, places)
    compile_packed(qkv, angles, table, places)
    compile_padded_heads(table, places)
    sample.sample_rows(torch.zeros(4, 151936, dtype=bf16), places, places, torch.ones(4))
    compile_sampling(places)
    for rows in (1, 8):
        x, gate_up = torch.zeros(rows, 1024, dtype=bf16), torch.zeros(4096, 1024, dtype=bf16)
        for curve in ("silu", "gelu_tanh"):
            skinny.skinny_linear(x, gate_up, gate=curve)
            fp8.quantize_rows(gate_up, gate=curve)
        norm.gate_mul(gate_up, "gelu")
        norm.norm_add(x, torch.zeros(1024), 1e-6, x, 1.0)
    for rows in (1, 64):
        numbers, scales = torch.zeros(4096, 512, dtype=torch.uint8), torch.zeros(4096, 8, dtype=torch.float16)
        for least in (None, scales):
            four_bits.four_bit_linear(torch.zeros(rows, 1024, dtype=bf16), FourBits(numbers, scales, least), None)
    if GLUON:
        compile_gated()
    compile_experts()
    compile_latent()
    compile_recurrent()
    compile_channel_delta()
    compile_short_conv()
    json.dump(launched, sys.stdout)


def compile_fixed(q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, places: torch.Tensor) -> None:
    for rows in (1, 64, 4096):
        x, weight = torch.zeros(rows, 4096, dtype=q.dtype), torch.zeros(4096, 4096, dtype=q.dtype)
        fixed_linear.fixed_linear(x, weight)
    plan = attention.plan_attention(table, places, [1] * 4, [1024] * 4, 16, None, q.dtype)
    fixed_tiles.paged_attention(q, cache, cache, plan, 0.1)
    filters = (places, torch.ones(4).double(), torch.ones(4), torch.ones(4))
    fixed_sampling.sample_filtered(torch.zeros(4, 151936, dtype=q.dtype), places, places, torch.ones(4), *filters)


def compile_padded_heads(table: torch.Tensor, places: torch.Tensor) -> None:
    """Heads that are no power of two, as in Phi-2, over a cache of FP8."""
    cache, qkv = torch.zeros(10, 64, 8, 80).to(torch.float8_e4m3fn), torch.zeros(4, 48 * 80, dtype=torch.bfloat16)
    q = rope.qk_norm_rope_write(qkv, None, None, 1e-6, Angles(places, torch.rand(40)), cache, cache, places, 32)
    for counts in ([1] * 4, [4]):
        plan = attention.plan_attention(table, places, counts, [1024] * len(counts), 64, None, torch.bfloat16)
        attention.paged_attention(q, cache, cache, plan, 0.1)


def compile_latent() -> None:
    """The shapes of DeepSeek V3."""
    bf16 = torch.bfloat16
    cache, places = torch.zeros(10, 64, 1, 576, dtype=bf16), torch.arange(4)
    angles = Angles(places, torch.rand(32))
    for heads in (128, 16):
        entry, norm, q = (
            torch.zeros(4, 576, dtype=bf16),
            torch.ones(512, dtype=bf16),
            torch.zeros(4, heads, 192, dtype=bf16),
        )
        q_rope = latent.latent_write(q, entry, norm, 1e-6, angles, cache, places, True)
        up = torch.zeros(heads, 256, 512, dtype=bf16)
        seen = latent_heads.head_product(q[..., :128].transpose(0, 1), up[:, :128])
        latent_heads.head_product(seen, up[:, 128:].transpose(1, 2))
        for counts in ([1] * 4, [4]):
            table = torch.zeros(len(counts), 64, dtype=torch.int32)
            plan = attention.plan_attention(table, places, counts, [1024] * len(counts), 64, None, bf16)
            latent.latent_attention(torch.zeros(heads, 4, 512, dtype=bf16), q_rope, cache, plan, 0.1)
    if GLUON:
        compile_latent_many()


def compile_latent_many() -> None:
    """One kernel for all kinds of steps."""
    bf16 = torch.bfloat16
    cache, q_latent, q_rope = (
        torch.zeros(*size, dtype=bf16) for size in ((10, 16, 1, 576), (128, 4, 512), (4, 128, 64))
    )
    assert latent_many.supports(q_latent, q_rope, cache)
    for counts, rows, width in (([1] * 4, None, 64), ([1] * 4, torch.arange(4), 63), ([3, 1], None, 64)):
        table = torch.zeros(len(counts), width, dtype=torch.int32)
        plan = attention.plan_attention(table, torch.arange(4), counts, [1024] * len(counts), 16, None, bf16, rows)
        latent_many.latent_attention(q_latent, q_rope, cache, plan, 0.1)
    assert len(variants["_latent_hopper_kernel"]) == 1, "a step has to wait for a kernel that no start compiled"


def compile_gated() -> None:
    """One kernel for all numbers of rows and shapes of weights, and for each curve."""
    for rows, width, inner_width in ((1024, 1024, 3072), (1025, 384, 128)):
        x, weight = (torch.zeros(size, width, dtype=torch.bfloat16) for size in (rows, 2 * inner_width))
        for curve in gated_hopper.CURVES:
            gated_hopper.gated_linear(x, weight, curve)
    assert len(variants["_gated_hopper_kernel"]) == len(gated_hopper.CURVES), (
        "a step has to wait for a kernel that no start compiled"
    )


def compile_experts() -> None:
    """The shapes of Qwen3-30B-A3B, with few experts."""
    bf16 = torch.bfloat16
    weights = ExpertWeights(torch.zeros(8, 1536, 2048, dtype=bf16), torch.zeros(8, 2048, 768, dtype=bf16))
    router, norm = torch.zeros(8, 2048, dtype=bf16), torch.ones(2048, dtype=bf16)
    for tokens in (1, 4, 8, 32, 64, 2048):
        x = torch.zeros(tokens, 2048, dtype=bf16)
        if tokens <= route.FEW_ROWS:  # beyond, the router's product is torch's, and not every CPU has bfloat16
            route.norm_route(x, norm, 1e-6, router, None, None, Routing(8, 4))
        chosen, shares = route.route(torch.zeros(tokens, 8, dtype=bf16), None, Routing(8, 4))
        experts.run_experts(x, weights, chosen, shares, x)
        if tokens <= experts_few.MAX_TOKENS:  # here so many share so few experts that tiles are quicker
            experts_few.run_few(x, weights, chosen, shares, x)
        fixed_experts.norm_route(x, norm, 1e-6, router, None, None, Routing(8, 4))
        fixed_experts.run_experts(x, weights, chosen, shares, x)
        if tokens in (1, 2048):  # Gemma 4's kind
            route.route(torch.zeros(tokens, 8, dtype=bf16), None, Routing(8, 4), torch.ones(8))
            experts.run_experts(x, replace(weights, activation=GatedActivation(curve="gelu_tanh")), chosen, shares)
    fp8 = torch.float8_e4m3fn
    scaled = ExpertWeights(
        torch.zeros(8, 1536, 2048, dtype=fp8), torch.zeros(8, 2048, 768, dtype=fp8),
        gate_up_scale=torch.zeros(8, 1536), down_scale=torch.zeros(8, 2048),
    )  # fmt: skip
    for tokens in (1, 8, 2048):
        x = torch.zeros(tokens, 2048, dtype=bf16)
        chosen, shares = torch.zeros(tokens, 4, dtype=torch.int32), torch.zeros(tokens, 4)
        experts.run_experts(x, scaled, chosen, shares, x)
    grouped = Routing(256, 8, "sigmoid", True, 2.5, 8, 4, 2)
    route.route(torch.zeros(1, 256, dtype=bf16), torch.zeros(256), grouped)


def compile_recurrent() -> None:
    bf16 = torch.bfloat16
    for shape, delta in ((RecurrentShape(16, 32, 128, 128, 4), True), (RecurrentShape(8, 128, 128, 64, 4), False)):
        conv, heads = torch.zeros(shape.channels, 1, 4, dtype=bf16), torch.zeros(shape.num_heads)
        x = torch.zeros(130, shape.channels + shape.values + (2 if delta else 1) * shape.num_heads, dtype=bf16)
        state = torch.zeros(2, shape.slot_elements)
        plan = recurrent.plan_recurrent(torch.arange(2), torch.arange(130), [129, 1])
        many = recurrent.plan_recurrent(torch.zeros(130, dtype=torch.int64), torch.arange(130), [1] * 130)
        shifted = recurrent.plan_recurrent(torch.arange(3)[1:], torch.arange(131)[1:], [129, 1])
        crowd = recurrent.plan_recurrent(torch.zeros(13, dtype=torch.int64), torch.arange(130), [10] * 13)
        walk = fixed_recurrent.plan_recurrent(torch.arange(2), torch.arange(4), [3, 1])
        if delta:
            weights = DeltaWeights(conv, heads, heads, torch.ones(shape.value_dim, dtype=bf16), 1e-6)
            assert recurrent_walk.supports(x, shape, state)
            for each in (plan, many, shifted, crowd):
                recurrent.gated_delta_net(x, weights, shape, state, each)
                if GLUON:
                    recurrent_walk.gated_delta_net(x, weights, shape, state, each)
            for name, num in (("_ready_kernel", 1), ("_walk_hopper_kernel", 2)) if GLUON else ():
                assert len(variants[name]) == num, "a step has to wait for a kernel that no start compiled"
            fixed_recurrent.gated_delta_net(x[:4], weights, shape, state, walk)
        else:
            norm, bias = torch.ones(shape.values, dtype=bf16), torch.zeros(shape.channels, dtype=bf16)
            weights = MambaWeights(conv, bias, heads, heads, heads, norm, 1e-5, 8, 0.0, float("inf"))
            assert mamba_walk.supports(x, weights, shape, state)
            for each in (plan, many, shifted, crowd):
                recurrent.mamba2(x, weights, shape, state, each)
                if GLUON:
                    mamba_walk.mamba2(x, weights, shape, state, each)
            if GLUON:
                assert len(variants["_mamba_hopper_kernel"]) == len(variants["_mamba_gates_kernel"]) == 1
            fixed_recurrent.mamba2(x[:4], weights, shape, state, walk)


def compile_channel_delta() -> None:
    bf16, shape = torch.bfloat16, RecurrentShape(32, 32, 128, 128, 4)
    conv, norm = torch.zeros(shape.channels, 1, 4, dtype=bf16), torch.ones(shape.value_dim, dtype=bf16)
    weights = DeltaWeights(conv, torch.zeros(shape.num_heads), torch.zeros(shape.keys), norm, 1e-6)
    x = torch.zeros(130, shape.channels + shape.num_heads, dtype=bf16)
    forget, gate = torch.zeros(130, shape.keys, dtype=bf16), torch.zeros(130, shape.values, dtype=bf16)
    state = torch.zeros(2, shape.slot_elements)
    rank = torch.zeros(130, x.shape[1] + 256, dtype=bf16)[:, : x.shape[1]]  # as a layer has it: other columns behind
    assert channel_walk.supports(x, forget, gate, shape, state)
    for counts, shift, each in (([129, 1], 0, x), ([1] * 130, 0, x), ([10] * 13, 0, x), ([129, 1], 1, rank)):
        slots = torch.zeros(len(counts) + 1, dtype=torch.int64)[shift:][: len(counts)]
        plan = recurrent.plan_recurrent(slots, torch.arange(131)[shift:][:130], counts)
        recurrent_channel.channel_delta_net(each, forget, gate, weights, shape, state, plan)
        if GLUON:
            channel_walk.channel_delta_net(each, forget, gate, weights, shape, state, plan)
    for name, num in (("_channel_ready_kernel", 1), ("_channel_hopper_kernel", 2)) if GLUON else ():
        assert len(variants[name]) == num, "a step has to wait for a kernel that no start compiled"
    walk = fixed_recurrent.plan_recurrent(torch.arange(2), torch.arange(4), [3, 1])
    fixed_recurrent.channel_delta_net(x[:4], forget[:4], gate[:4], weights, shape, state, walk)


def compile_short_conv() -> None:
    bf16, shape = torch.bfloat16, ConvShape(2048, 3)
    weights = ConvWeights(torch.zeros(2048, 1, 3, dtype=bf16), None)
    x, state = torch.zeros(130, 3 * 2048, dtype=bf16), torch.zeros(2, shape.slot_elements)
    for counts in ([129, 1], [1] * 130):
        slots = torch.zeros(len(counts), dtype=torch.int64)
        plan = recurrent.plan_recurrent(slots, torch.arange(130), counts)
        recurrent_short.short_conv(x, weights, shape, state, plan)


def compile_sampling(places: torch.Tensor) -> None:
    """As real steps call them: bfloat16 logits, some of them edited in float32, and a grammar's mask."""
    vocab = 151936
    logits, ones = torch.zeros(4, vocab, dtype=torch.bfloat16), torch.ones(4)
    mask = torch.zeros(4, vocab // 32, dtype=torch.int32)
    edited = (torch.zeros(2, vocab), torch.zeros(4, dtype=torch.int32))
    filters = (places, ones.double(), ones, ones)
    for given in ({}, {"mask": mask, "edited": edited}):
        sample.sample_rows(logits, places, places, ones, **given)
        sample_filters.sample_filtered(logits, places, places, ones, *filters, **given)
    copies, rows = edited
    cells, history = torch.arange(100), torch.zeros(9, 4096, dtype=torch.int32)
    sample_edits.copy_samples(logits, places)
    sample_edits.add_bias(copies, rows, cells, torch.zeros(100))
    sample_edits.forbid_stops(copies, rows, cells, cells, cells, places)
    sample_edits.forbid_bad_words(copies, rows, cells, cells, cells[:, None].repeat(1, 3), history, places, places)
    sample_edits.apply_penalties(copies, rows, places, places, ones, ones, ones, history, places, places)
    sample_logprobs.score_rows(logits, places, places, 20)


if __name__ == "__main__":
    main()
