"""The Triton kernels around attention and products against their reference in float64, on random shapes. `tests/gpu`
runs the large cases on a GPU, `tests/cpu` the small ones under Triton's interpreter. Outputs are poisoned with NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.kernels.activations import CURVES
from quire.kernels.angles import Angles
from quire.kernels.reference import small_ops as reference
from tests.gpu.where import Where, close

# ---------------------------------------------------------------------------------------------------------------------
# Norms and activations


def check_norms(where: Where) -> None:
    from quire.kernels.triton.linear import norm

    shapes = [(1, 1024), (7, 4096), (300, 2560), (8192, 64)] if where.large else [(1, 64), (5, 72)]
    for dtype in where.dtypes:
        for rows, width in shapes:
            x, weight = where.normal(rows, width, dtype=dtype), where.normal(width, dtype=dtype)
            where.settle()
            where.poison()
            expected = reference.rms_norm(x.double(), weight.double(), 1e-6)
            close(norm.rms_norm(x, weight, 1e-6), expected, dtype, f"rms_norm {rows}x{width}")
            stream = where.normal(rows, width + 8, dtype=dtype)[:, :width]
            before = stream.double()
            where.settle()
            added = norm.norm_add(x, weight, 1e-6, stream, 0.5)
            assert added is stream
            close(added, before + 0.5 * expected, dtype, f"norm_add {rows}x{width}")
        heads = where.normal(3, 6, 64, dtype=dtype)
        weight = where.normal(6, 64, dtype=dtype)
        where.settle()
        wide = heads.double()
        expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
        close(norm.rms_norm(heads, weight, 1e-6), expected, dtype, "rms_norm with a weight per head")


def check_gate_mul(where: Where) -> None:
    from quire.kernels.triton.linear import norm

    for dtype in where.dtypes:
        for rows, width in [(1, 3072), (5, 1000), (600, 12288)] if where.large else [(3, 40)]:
            x = where.normal(rows, 2 * width, dtype=dtype)
            for curve in CURVES:
                where.poison()
                expected = reference.gate_mul(x.double(), curve)
                close(norm.gate_mul(x, curve), expected, dtype, f"gate_mul {curve} {rows}x{width}")


def check_rope_write(where: Where) -> None:
    from quire.kernels.triton.attention.rope_write import qk_norm_rope_write

    shapes = [(16, 8, 128, 16), (32, 8, 128, 16), (9, 3, 64, 8), (4, 1, 256, 32), (4, 4, 80, 16),
              (5, 5, 96, 16), (3, 1, 192, 16)] if where.large else [(6, 3, 16, 8), (3, 1, 24, 8)]  # fmt: skip
    for dtype in where.dtypes:
        for heads, kv_heads, head_dim, page in shapes:
            for tokens in (1, 5, 200) if where.large else (3,):
                for normed in (True, False):
                    _check_rope_write(where, dtype, heads, kv_heads, head_dim, page, tokens, normed, qk_norm_rope_write)


def _check_rope_write(where, dtype, heads, kv_heads, head_dim, page, tokens, normed, kernel):  # type: ignore[no-untyped-def]
    qkv = where.normal(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    q_weight, k_weight = (where.normal(head_dim, dtype=dtype) + 1 if normed else None for _ in range(2))
    positions = torch.randint(0, 3000, (tokens,), device=where.device)
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, head_dim, 2, device=where.device) / head_dim)
    num_pages = tokens // page + 3
    slots = torch.randperm(num_pages * page, device=where.device)[:tokens]
    slots[tokens // 2] = -1  # padding
    angle = (positions.float()[:, None] * torch.cat((-frequencies, frequencies))).unsqueeze(1)
    cos, sin = angle.cos(), angle.sin()
    whole = qkv.double().view(tokens, heads + 2 * kv_heads, head_dim)
    q, k, v = whole.split((heads, kv_heads, kv_heads), 1)
    if q_weight is not None and k_weight is not None:
        q = reference.rms_norm(q, q_weight.double(), 1e-6)
        k = reference.rms_norm(k, k_weight.double(), 1e-6)
    q, k = (reference.rope(part, cos.double(), sin.double()) for part in (q, k))
    for angles in (
        Angles(positions, frequencies.float()),
        Angles(cos=cos.contiguous(), sin=sin.contiguous()),
    ):
        caches = [torch.full((num_pages, page, kv_heads, head_dim), torch.nan, dtype=dtype, device=where.device)
                  for _ in range(2)]  # fmt: skip
        where.poison()
        out = kernel(qkv, q_weight, k_weight, 1e-6, angles, *caches, slots, heads)
        name = f"qk_norm_rope_write {heads}/{kv_heads} heads of {head_dim}, {tokens} tokens"
        close(out, q, dtype, name)
        live = slots >= 0
        for cache, expected in zip(caches, (k, v), strict=True):
            flat = cache.view(-1, kv_heads, head_dim)
            close(flat[slots[live]], expected[live], dtype, name + ", cache") if live.any() else None
            assert torch.isnan(flat).any(-1).sum() == (flat.shape[0] - live.sum()) * kv_heads, name + ": wrote too much"


# ---------------------------------------------------------------------------------------------------------------------
# Rows and sampling


def check_rows(where: Where) -> None:
    from quire.kernels.triton import step_inputs as kernels

    max_rows, max_len, page = 12, 200, 16
    row_tokens = torch.randint(0, 1000, (max_rows, max_len), dtype=torch.int32, device=where.device)
    computed = torch.randint(0, max_len - 2, (max_rows,), device=where.device)
    table = torch.randint(0, 99, (max_rows, 14), dtype=torch.int32, device=where.device)
    keys, scales = torch.randint(0, 1 << 60, (max_rows,), device=where.device), where.normal(max_rows).float()
    rows = torch.tensor([3, 11, -1, 0], device=where.device)
    live, real = rows[rows >= 0], rows >= 0
    at = computed[live].clone()
    expected = computed.clone()
    expected[live] += 1
    inputs = kernels.gather_rows(rows, row_tokens, computed, keys, scales)
    slots = kernels.gather_slots(rows, inputs.positions, table, page)
    assert torch.equal(inputs.tokens[real], row_tokens[live, at].long()) and inputs.tokens[2] == 0
    assert torch.equal(inputs.positions[real], at) and inputs.positions[2] == -1
    assert torch.equal(inputs.seq_lens[real].long(), at + 1) and inputs.seq_lens[2] == 0
    assert torch.equal(inputs.lengths[real], at + 1) and inputs.lengths[2] == 0
    assert torch.equal(inputs.keys[real], keys[live]) and torch.equal(inputs.scales[real], scales[live])
    assert torch.equal(slots[real], table[live, at // page].long() * page + at % page) and slots[2] == -1
    assert torch.equal(computed, expected)


def check_sampling(where: Where) -> None:
    from quire.kernels.triton.sampling.sample import sample_rows
    from quire.sampling.noise import Noise, stream_key

    for num_samples, vocab in [(1, 151936), (8, 32000), (256, 151936), (3, 262144)] if where.large else [(5, 5000)]:
        for dtype in where.dtypes:
            logits = where.normal(num_samples, vocab, dtype=dtype) * 2
            keys = torch.tensor([stream_key(seed, 1) for seed in range(num_samples)], device=where.device)
            positions = torch.randint(0, 9999, (num_samples,), device=where.device)
            temperature = torch.rand(num_samples, device=where.device) + 0.2
            inv = torch.where(torch.arange(num_samples, device=where.device) % 3 == 1, 0.0, 1 / temperature)
            scores = logits.float() * inv[:, None] + Noise(vocab, where.device).gumbel(keys, positions)
            scores = torch.where(inv[:, None] == 0, logits.float(), scores)
            mask = torch.randint(-(2**31), 2**31 - 1, (num_samples, -(-vocab // 32)), dtype=torch.int32,
                                 device=where.device)  # fmt: skip
            bits = (mask[:, :, None] >> torch.arange(32, device=where.device, dtype=torch.int32)) & 1
            allowed = bits.flatten(1)[:, :vocab].bool()
            for given, wanted in ((None, scores), (mask, scores.masked_fill(~allowed, -torch.inf))):
                tokens, bad = sample_rows(logits, keys, positions, inv, mask=given)
                assert not bad.any()
                chosen = wanted.gather(1, tokens[:, None])[:, 0]
                gap = wanted.amax(1) - chosen  # above 0 only at near-ties
                assert (gap <= 1e-4).all(), f"sampling: chose {gap.max()} below the best"
                assert (tokens == wanted.argmax(1)).float().mean() >= 0.99
                greedy = inv == 0
                assert torch.equal(tokens[greedy], wanted.argmax(1)[greedy])
    _check_bad_rows(where, sample_rows)


def _check_bad_rows(where: Where, sample_rows: Callable[..., tuple[Tensor, Tensor]]) -> None:
    vocab = 9000
    logits = where.normal(5, vocab)
    logits[1, 8000] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    logits[4] = -torch.inf
    logits[4, 8999] = -5.0
    rows = torch.tensor([0, 3, 1, -1, 2], device=where.device)
    row_tokens = torch.full((4, 10), -1, dtype=torch.int32, device=where.device)
    computed = torch.tensor([1, 2, 3, 4], device=where.device)
    zeros = torch.zeros(5, dtype=torch.int64, device=where.device)
    for inv in (0.0, 1.0):
        tokens, bad = sample_rows(logits, zeros, zeros, torch.full((5,), inv, device=where.device),
                                  append_to=(rows, row_tokens, computed))  # fmt: skip
        assert bad.tolist() == [False, True, True, True, False]
        assert tokens[4] == 8999 and tokens[1:4].tolist() == [0, 0, 0]
        assert [row_tokens[r, computed[r]].item() for r in (0, 3, 1, 2)] == tokens[[0, 1, 2, 4]].tolist()
        assert (row_tokens >= 0).sum() == 4


CHECKS: dict[str, Callable[[Where], None]] = {
    "norms": check_norms,
    "gate_mul": check_gate_mul,
    "rope_write": check_rope_write,
    "rows": check_rows,
    "sampling": check_sampling,
}
