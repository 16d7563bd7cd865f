"""Every Triton kernel against its reference in float64, on random shapes. `tests/gpu` runs the large cases on a GPU,
`tests/cpu` the small ones under Triton's interpreter. Outputs are poisoned with NaN before they are computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import reference
from quire.kernels.angles import Angles
from quire.kernels.recurrent import RecurrentShape
from tests.gpu.recurrent_checks import check_recurrent
from tests.gpu.where import Where

BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float8_e4m3fn: 6e-2}

GARBAGE = 1.0e4  # what lies in slots nobody has written: finite, as caches promise, and fatal to any sum it leaks into


def close(out: Tensor, expected: Tensor, dtype: torch.dtype, what: str, bound: float | None = None) -> None:
    out, expected = out.double(), expected.double()
    assert out.shape == expected.shape, f"{what}: shape {tuple(out.shape)}, not {tuple(expected.shape)}"
    error = ((out - expected).norm() / expected.norm().clamp(min=1e-30)).item()
    assert error <= (bound or BOUNDS[dtype]), f"{what}: relative error {error:.2e} in {dtype}"


# ---------------------------------------------------------------------------------------------------------------------
# Norms and activations


def check_norms(where: Where) -> None:
    from quire.kernels.triton import norm

    shapes = [(1, 1024), (7, 4096), (300, 2560), (8192, 64)] if where.large else [(1, 64), (5, 72)]
    for dtype in where.dtypes:
        for rows, width in shapes:
            x, residual = where.normal(rows, width, dtype=dtype), where.normal(rows, width, dtype=dtype)
            weight = where.normal(width, dtype=dtype)
            where.settle()
            where.poison()
            expected = reference.rms_norm(x.double(), weight.double(), 1e-6)
            close(norm.rms_norm(x, weight, 1e-6), expected, dtype, f"rms_norm {rows}x{width}")
            total = (x.double() + residual.double()).to(dtype)
            expected = reference.rms_norm(total.double(), weight.double(), 1e-6)
            normed, stream = norm.add_rms_norm(x, residual, weight, 1e-6)
            close(stream, total, dtype, "add_rms_norm: the sum")
            close(normed, expected, dtype, f"add_rms_norm {rows}x{width}")
        heads = where.normal(3, 6, 64, dtype=dtype)
        weight = where.normal(6, 64, dtype=dtype)
        where.settle()
        wide = heads.double()
        expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
        close(norm.rms_norm(heads, weight, 1e-6), expected, dtype, "rms_norm with a weight per head")


def check_silu_mul(where: Where) -> None:
    from quire.kernels.triton import norm

    for dtype in where.dtypes:
        for rows, width in [(1, 3072), (5, 1000), (600, 12288)] if where.large else [(3, 40)]:
            x = where.normal(rows, 2 * width, dtype=dtype)
            where.poison()
            close(norm.silu_mul(x), reference.silu_mul(x.double()), dtype, f"silu_mul {rows}x{width}")


def check_rope_write(where: Where) -> None:
    from quire.kernels.triton.rope import qk_norm_rope_write

    shapes = [(16, 8, 128, 16), (32, 8, 128, 16), (9, 3, 64, 8), (4, 1, 256, 32)] if where.large else [(6, 3, 16, 8)]
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
# Attention


@dataclass
class Paged:
    """A random batch over a cache with scattered pages."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    positions: Tensor
    counts: list[int]
    lens: list[int]
    page: int

    @classmethod
    def make(cls, where: Where, dtype: torch.dtype, counts: list[int], lens: list[int], heads: int, kv_heads: int,
             head_dim: int, page: int) -> Paged:  # fmt: skip
        device = where.device
        need = [-(-n // page) for n in lens]
        num_pages = sum(need) + 2
        shuffled = torch.randperm(num_pages - 1) + 1
        table = torch.zeros(len(lens), max(need) + 1, dtype=torch.int32)
        caches = [torch.full((num_pages, page, kv_heads, head_dim), GARBAGE, dtype=dtype, device=device)
                  for _ in range(2)]  # fmt: skip
        place = 0
        for row, (num, length) in enumerate(zip(need, lens, strict=True)):
            pages = shuffled[place : place + num]
            table[row, :num] = pages.int()
            place += num
            slots = (pages[:, None] * page + torch.arange(page)).view(-1)[:length].to(device)
            for cache in caches:
                cache.view(-1, kv_heads, head_dim)[slots] = where.normal(length, kv_heads, head_dim, dtype=dtype)
        positions = [n - count + i for n, count in zip(lens, counts, strict=True) for i in range(count)]
        q = where.normal(sum(counts), heads, head_dim, dtype=dtype)
        return cls(q, *caches, table.to(device), torch.tensor(positions, device=device), counts, lens, page)

    def expected(self, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None = None) -> Tensor:
        out, first = [], 0
        kv_heads, head_dim = self.k_cache.shape[2:]
        for row, (count, length) in enumerate(zip(self.counts, self.lens, strict=True)):
            pages = self.page_table[row, : -(-length // self.page)].long()
            k, v = (c[pages].reshape(-1, kv_heads, head_dim)[:length].double() for c in (self.k_cache, self.v_cache))
            q = self.q[first : first + count].double().view(count, kv_heads, -1, head_dim)
            scores = torch.einsum("qkgd,nkd->kgqn", q, k) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            where = self.positions[first : first + count, None]
            keys = torch.arange(length, device=k.device)
            hidden = keys > where
            if window is not None:
                hidden |= keys <= where - window
            scores = scores.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                beside = sinks.double().view(kv_heads, -1, 1, 1).expand(-1, -1, count, -1)
                scores = torch.cat((scores, beside), -1)
            weights = scores.softmax(-1)[..., :length]
            out.append(torch.einsum("kgqn,nkd->qkgd", weights, v).reshape(count, -1))
            first += count
        return torch.cat(out)


def _run_attention(where: Where, dtype: torch.dtype, counts: list[int], lens: list[int], shape: tuple[int, int, int],
                   page: int, window: int | None, softcap: float | None, slack: int = 0) -> None:  # fmt: skip
    from quire.kernels.triton import attention

    batch = Paged.make(where, dtype, counts, lens, *shape, page)
    scale = shape[2] ** -0.5
    plan = attention.plan_attention(batch.page_table, batch.positions, counts, [n + slack for n in lens], page, window,
                                    dtype)  # fmt: skip
    name = f"attention {shape} page {page} window {window} softcap {softcap} counts {counts[:8]} lens {lens[:8]}"
    for _ in range(2):  # the second layer finds the workspace as the first left it
        where.poison()
        out = attention.paged_attention(batch.q, batch.k_cache, batch.v_cache, plan, scale, softcap)
        close(out, batch.expected(scale, window, softcap), dtype, name)


def _attention_shapes(where: Where, dtype: torch.dtype) -> list[tuple[int, int, int]]:
    """(heads, kv heads, head_dim): all with the type that is served, a few with the others."""
    if not where.large:
        return [(4, 2, 16), (3, 1, 32)]
    if dtype == torch.bfloat16:
        return [(16, 8, 128), (32, 8, 128), (9, 3, 64), (8, 8, 128), (16, 1, 256), (28, 4, 128)]
    return [(16, 8, 128), (9, 3, 64)]


def check_decode(where: Where) -> None:
    rng = where.random
    for dtype in where.dtypes:
        for shape in _attention_shapes(where, dtype):
            sizes = rng.sample([(1, 5), (1, 1024), (3, 5000), (40, 1500), (150, 2600)], 2) if where.large else [
                (3, 40), (1, 200)]  # fmt: skip
            for num_rows, longest in sizes:
                lens = [rng.randint(1, longest) for _ in range(num_rows - 1)] + [longest]
                window = rng.choice((None, rng.randint(1, 700 if where.large else 30)))
                softcap = rng.choice((None, 20.0))
                page = rng.choice((8, 16, 16, 64))
                _run_attention(where, dtype, [1] * num_rows, lens, shape, page, window, softcap, slack=17)


def check_prefill(where: Where) -> None:
    rng = where.random
    for dtype in where.dtypes:
        for shape in _attention_shapes(where, dtype):
            for num_rows, longest in [(1, 700), (6, 900)] if where.large else [(3, 50)]:
                lens = [rng.randint(2, longest) for _ in range(num_rows - 1)] + [longest]
                counts = [rng.choice((n, rng.randint(1, n), 1)) for n in lens]  # fresh, catching up, one token
                counts[-1] = rng.randint(2, longest)
                window = rng.choice((None, rng.randint(1, 300 if where.large else 20)))
                softcap = rng.choice((None, 20.0))
                page = rng.choice((8, 16, 16, 64))
                _run_attention(where, dtype, counts, lens, shape, page, window, softcap)


def check_share_out(where: Where) -> None:
    """Every item goes to exactly one program, and no program has much more to do than another."""
    from quire.kernels.triton import prefill
    from quire.kernels.triton.prefill_shares import MERGE, RECORD, share_out

    rng = where.random
    for _ in range(20):
        counts = [rng.randint(1, 3000) for _ in range(rng.randint(1, 12))]
        bounds = [count + rng.choice((0, rng.randint(0, 5000))) for count in counts]
        rows = [row for row, count in enumerate(counts) if count > 1] or [0]
        tiles = prefill.list_tiles(rows, counts, bounds, 32)
        assert sum(tile[2] for tile in tiles) == sum(counts[row] for row in rows)
        window = rng.choice((None, rng.randint(1, 900)))
        num_programs = rng.randint(1, 132)
        shares = share_out(tiles, 8, window, num_programs)
        begins, numbers = shares.items[: num_programs + 1].tolist(), shares.items[num_programs + 1 :].tolist()
        items = list(zip(*[iter(numbers)] * RECORD, strict=True))
        assert begins[0] == 0 and begins[-1] == len(items)
        found: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for item in items:
            found.setdefault(item[:4], []).append(item[4:7])
        assert sorted(found) == sorted((kv_head, *tile[:3]) for tile in tiles for kv_head in range(8))
        merges = {tuple(m[2:5]): (m[0], m[1]) for m in zip(*[iter(shares.merges.tolist())] * MERGE, strict=True)}
        slots = []
        for (kv_head, _, first, size), parts in found.items():
            assert sorted(part[0] for part in parts) == list(range(len(parts))), "each share once"
            assert {part[1] for part in parts} == {len(parts)}
            if len(parts) > 1:
                slots += [part[2] for part in parts]
                slot, num_shares = merges.pop((kv_head, first, size))
                assert num_shares == len(parts) and sorted(part[2] for part in parts) == [
                    *range(slot, slot + num_shares)
                ]
        assert not merges and sorted(slots) == list(range(len(slots))) and len(slots) <= num_programs
        cost = {tile[1]: -(-tile[3] // 128) + 1 for tile in tiles}
        loads = [sum(-(-cost[item[2]] // item[5]) for item in items[a:b]) for a, b in itertools.pairwise(begins)]
        assert all(loads) or len(items) < num_programs, "a program has nothing to do, though there are items enough"
        assert window is not None or len(items) < num_programs or max(loads) - min(loads) <= max(cost.values())


def check_permanent_table(where: Where) -> None:
    """Rows found through `row_index` in a table of all rows, and a row that only pads the step."""
    from quire.kernels.triton import attention

    dtype = where.dtypes[0]
    lens = [37, 260, 5, 90]
    batch = Paged.make(where, dtype, [1] * 4, lens, 4, 2, 64, 16)
    order = torch.tensor([2, 0, 3, 1], device=where.device)
    table = torch.empty(9, batch.page_table.shape[1], dtype=torch.int32, device=where.device).fill_(2**30)
    places = torch.tensor([7, 2, 5, 1], device=where.device)
    table[places] = batch.page_table
    q = torch.cat((batch.q[order], batch.q[:1]))
    positions = torch.cat((batch.positions[order], torch.full((1,), -1, device=where.device)))
    rows = torch.cat((places[order], torch.full((1,), -1, device=where.device)))
    for bound in (300, 16):
        plan = attention.plan_attention(table, positions, [1] * 5, [bound] * 5, 16, None, dtype, row_index=rows)
        out = attention.paged_attention(q, batch.k_cache, batch.v_cache, plan, 0.125)
        close(out[:4], batch.expected(0.125, None, None)[order], dtype, "attention by row_index")
        assert (out[4] == 0).all()


def check_fp8_cache(where: Where) -> None:
    """Written, and read back by decode and prefill, with scales that matter."""
    from quire.kernels.triton import attention
    from quire.kernels.triton.rope import qk_norm_rope_write

    heads, kv_heads, head_dim, page = (32, 8, 128, 16) if where.large else (4, 2, 32, 8)
    dtype = where.dtypes[-1]
    length = 300 if where.large else 30
    qkv = where.normal(length, (heads + 2 * kv_heads) * head_dim, dtype=dtype) * 3
    positions = torch.arange(length, device=where.device)
    frequencies = torch.rand(head_dim // 2, device=where.device)
    pages = -(-length // page)
    table = torch.randperm(pages, device=where.device).int()[None]
    slots = table[0, positions // page].long() * page + positions % page
    results = []
    for cache_dtype, scales in ((dtype, attention.Scales()), (torch.float8_e4m3fn, attention.Scales(0.05, 0.04))):
        caches = [torch.zeros(pages, page, kv_heads, head_dim, device=where.device).to(cache_dtype) for _ in range(2)]
        q = qk_norm_rope_write(qkv, None, None, 0.0, Angles(positions, frequencies), *caches, slots, heads, scales.k,
                               scales.v)  # fmt: skip
        plan = attention.plan_attention(table, positions, [length], [length], page, None, dtype)
        out = attention.paged_attention(q, *caches, plan, 0.1 * head_dim**-0.5, scales=scales)
        plan = attention.plan_attention(table, positions[-1:], [1], [length], page, None, dtype)
        last = attention.paged_attention(q[-1:], *caches, plan, 0.1 * head_dim**-0.5, scales=scales)
        close(last, out[-1:], dtype, "decode against prefill")
        results.append(out)
    # The interpreter cuts fp8 off where the GPU rounds, so on the CPU only the order of magnitude is checked.
    bound = BOUNDS[torch.float8_e4m3fn] if where.large else 0.2
    close(results[1], results[0], dtype, "attention over an fp8 cache", bound)


# ---------------------------------------------------------------------------------------------------------------------
# Rows and sampling


def check_rows(where: Where) -> None:
    from quire.kernels.triton import rows as kernels

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
    from quire.kernels.triton.sample import sample_rows
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


# ---------------------------------------------------------------------------------------------------------------------
# Products of few rows


def check_skinny(where: Where) -> None:
    from quire.kernels.triton.skinny import skinny_linear

    sizes = [(1024, 4096), (3072, 1024), (4096, 768), (576, 960)] if where.large else [(64, 48), (72, 33)]
    for dtype in where.dtypes:
        for in_features, out_features in sizes:
            weight = where.normal(2 * out_features, in_features, dtype=dtype)
            bias = where.normal(2 * out_features, dtype=dtype)
            norm_weight = where.normal(in_features, dtype=dtype)
            where.settle()
            for rows in (1, 2, 8, 16) if where.large else (1, 3):
                x = where.normal(rows, in_features, dtype=dtype)
                where.poison()
                name = f"skinny_linear {rows} x {in_features} x {out_features}"
                close(skinny_linear(x, weight), x.double() @ weight.double().T, dtype, name)
                residual = where.normal(rows, 2 * out_features, dtype=dtype)
                normed = reference.rms_norm(x.double(), norm_weight.double(), 1e-6)
                plain = normed @ weight.double().T + bias.double()
                out = skinny_linear(x, weight, bias, norm_weight=norm_weight, eps=1e-6, residual=residual,
                                    prefetch=weight)  # fmt: skip
                close(out, plain + residual.double(), dtype, name + " with norm, bias and residual")
                out = skinny_linear(x, weight, bias, norm_weight=norm_weight, eps=1e-6, silu_mul=True)
                close(out, reference.silu_mul(plain), dtype, name + " with norm, bias and silu_mul")


def check_skinny_fp8(where: Where) -> None:
    from quire.kernels.triton.skinny import skinny_linear

    for in_features, out_features in [(1024, 4096), (4096, 1024)] if where.large else [(64, 48)]:
        weight = where.normal(out_features, in_features)
        scale = weight.abs().amax(1) / 448
        stored = (weight / scale[:, None]).to(torch.float8_e4m3fn)
        where.settle()
        for rows in (1, 4):
            x = where.normal(rows, in_features, dtype=where.dtypes[-1])
            expected = x.double() @ (stored.double() * scale.double()[:, None]).T
            close(skinny_linear(x, stored, weight_scale=scale), expected, where.dtypes[-1], "skinny_linear fp8")


def check_fp8_linear(where: Where) -> None:
    from quire.kernels.triton.fp8 import fp8_linear, quantize_rows

    for in_features, out_features in [(1024, 4096), (4096, 1024)] if where.large else [(64, 48)]:
        weight = where.normal(out_features, in_features, dtype=where.dtypes[-1])
        stored, scale = quantize_rows(weight)
        close(stored.float() * scale[:, None], weight, torch.float8_e4m3fn, "quantize_rows")
        where.settle()
        for rows in (1, 16, 17, 300) if where.large else (1, 3):  # beyond 16, torch's product, which needs a GPU
            x = where.normal(rows, in_features, dtype=where.dtypes[-1])
            expected = x.double() @ weight.double().T
            close(fp8_linear(x, stored, scale), expected, torch.float8_e4m3fn, f"fp8_linear {rows} rows", 0.1)


def check_fp8_quantize(where: Where) -> None:
    """With the norm before it and with the SiLU-mul before it."""
    from quire.kernels.triton.fp8 import quantize_rows

    for rows, width in [(300, 4096), (3, 1000)] if where.large else [(3, 40)]:
        x = where.normal(rows, 2 * width, dtype=where.dtypes[-1])
        weight = where.normal(2 * width, dtype=where.dtypes[-1])
        for options, expected in (
            ({"norm_weight": weight, "eps": 1e-6}, reference.rms_norm(x.double(), weight.double(), 1e-6)),
            ({"silu_mul": True}, reference.silu_mul(x.double())),
        ):
            stored, scale = quantize_rows(x, **options)
            assert stored.shape == expected.shape
            close(stored.float() * scale[:, None], expected, torch.float8_e4m3fn, f"quantize_rows {options.keys()}")


def check_dequantize_pages(where: Where) -> None:
    from quire.kernels.triton.fp8 import dequantize_pages

    num_pages, shape = (200, (16, 8, 128)) if where.large else (5, (8, 2, 32))
    caches = [where.normal(num_pages, *shape, dtype=torch.float32).to(torch.float8_e4m3fn) for _ in range(2)]
    table = torch.randperm(num_pages, device=where.device).int().view(5, -1)
    rows, columns = (torch.arange(num_pages, device=where.device).int() % 5 for _ in range(2))
    columns = columns % table.shape[1]
    outs = [
        torch.full((num_pages, *shape), float("nan"), dtype=where.dtypes[-1], device=where.device) for _ in range(2)
    ]
    dequantize_pages(*caches, table, rows, columns, *outs, 0.5, 2.0)
    pages = table[rows.long(), columns.long()].long()
    for cache, out, scale in zip(caches, outs, (0.5, 2.0), strict=True):
        assert torch.equal(out.float(), cache.float()[pages] * scale)


def check_trial(where: Where) -> None:
    """What the loader tries before it builds a model: every row of the table passes, on its own terms."""
    from quire.kernels.table import select_ops
    from quire.kernels.trial import TrialShape, failing_rows

    for dtype in where.dtypes:
        for window in (None, 7):
            heads = (4096, 12288, 32, 8, 128) if where.large else (64, 96, 4, 2, 16)
            shape = TrialShape(*heads, 16, window, qk_norm=window is None, dtype=dtype, cache_dtype=dtype)
            failed = [
                (row.name, error) for row, error in failing_rows(select_ops("cuda"), shape, torch.device(where.device))
            ]
            assert not failed, f"{dtype}, window {window}: {failed}"


# ---------------------------------------------------------------------------------------------------------------------
# Recurrent layers

# A chunk's products are rounded to the type they are computed in before the state sums them up.
RECURRENT_BOUNDS = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}


def check_gated_delta_net(where: Where) -> None:
    large = [RecurrentShape(16, 32, 128, 128, 4), RecurrentShape(2, 4, 64, 128, 4)]
    shapes = large if where.large else [RecurrentShape(1, 2, 16, 40, 4)]
    check_recurrent(where, close, shapes, True, RECURRENT_BOUNDS)


def check_mamba2(where: Where) -> None:
    large = [RecurrentShape(8, 128, 128, 64, 4), RecurrentShape(1, 24, 256, 64, 4)]
    shapes = large if where.large else [RecurrentShape(1, 2, 24, 16, 3)]
    check_recurrent(where, close, shapes, False, RECURRENT_BOUNDS)


CHECKS: dict[str, Callable[[Where], None]] = {
    "norms": check_norms,
    "silu_mul": check_silu_mul,
    "rope_write": check_rope_write,
    "decode": check_decode,
    "prefill": check_prefill,
    "share_out": check_share_out,
    "permanent_table": check_permanent_table,
    "fp8_cache": check_fp8_cache,
    "rows": check_rows,
    "sampling": check_sampling,
    "skinny": check_skinny,
    "skinny_fp8": check_skinny_fp8,
    "fp8_linear": check_fp8_linear,
    "fp8_quantize": check_fp8_quantize,
    "dequantize_pages": check_dequantize_pages,
    "trial": check_trial,
    "gated_delta_net": check_gated_delta_net,
    "mamba2": check_mamba2,
}
