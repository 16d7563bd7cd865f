"""The kernels of the deterministic mode: right, and a row's bits are the same in whatever company. Run as
`kernel_checks` are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.cpu.bits import as_bits
from tests.gpu.paged_checks import PAGES, Paged
from tests.gpu.where import Where, close


def equal(got: Tensor, expected: Tensor, what: str) -> None:
    wrong = (as_bits(got) != as_bits(expected)).flatten().float()
    assert not wrong.any(), f"{what}: {wrong.mean().item():.2%} of the elements are other bits"


def check_fixed_linear(where: Where) -> None:
    from quire.kernels.triton.linear.deterministic import Tile, fixed_linear

    sizes = [(1024, 4096), (4096, 6144), (12288, 4096), (1000, 3001)] if where.large else [(40, 100), (64, 64)]
    tile = None if where.large else Tile(64, 16, 32, 4, 2)  # the interpreter's products go by the shape of a tile
    counts = (1, 2, 15, 16, 17, 33, 64, 65, 128, 300, 1025) if where.large else (1, 3, 17)
    for dtype in where.dtypes:
        for in_features, out_features in sizes:
            weight = where.normal(out_features, in_features, dtype=dtype) * in_features**-0.5
            bias = where.normal(out_features, dtype=dtype)
            x, residual = (where.normal(2100 if where.large else 20, n, dtype=dtype) for n in weight.shape[::-1])
            where.settle()
            where.poison()
            whole = fixed_linear(x, weight, bias, residual, tile)
            name = f"fixed_linear {in_features} x {out_features} in {dtype}"
            close(whole, x.double() @ weight.double().T + bias.double() + residual.double(), dtype, name)
            for count in counts:
                first = where.random.randrange(len(x) - count)
                rows = slice(first, first + count)
                got = fixed_linear(x[rows], weight, bias, residual[rows], tile)
                equal(got, whole[rows], f"{name}, {count} rows")


SHAPES = [(32, 8, 128, None, None, False), (16, 8, 64, 100, None, False), (12, 2, 80, None, 30.0, False),
          (8, 1, 256, None, None, True), (6, 6, 128, 700, None, True)]  # fmt: skip
SMALL_SHAPES = [(6, 2, 16, None, None, False), (4, 2, 24, 70, 30.0, True)]


def check_fixed_attention(where: Where) -> None:
    """Chunks, decodes, mixed steps; whole tiles and shared ones; window, softcap, sinks."""
    from quire.kernels.triton.attention import deterministic_tiles as fixed_tiles
    from quire.kernels.triton.attention import paged as attention

    lens = [3000, 3, 700, 513, 5000] if where.large else [140, 3]
    rng = where.random
    for dtype in where.dtypes:
        for heads, kv_heads, head_dim, window, softcap, has_sinks in SHAPES if where.large else SMALL_SHAPES:
            counts = [min(length, 70 if where.large else 9) for length in lens]
            page = rng.choice(PAGES)
            batch = Paged.make(where, dtype, counts, lens, heads, kv_heads, head_dim, page)
            sinks = where.normal(heads, dtype=dtype) * 2 if has_sinks else None
            name = f"{heads}/{kv_heads} heads of {head_dim}, page {page}, window {window}, softcap {softcap} in {dtype}"

            def attend(rows: list[int], tokens: list[slice], ends: list[int], batch: Paged = batch,
                       window: int | None = window, softcap: float | None = softcap, sinks: Tensor | None = sinks,
                       dtype: torch.dtype = dtype) -> Tensor:  # fmt: skip
                positions = torch.cat([batch.positions[part] for part in tokens])
                q = torch.cat([batch.q[part] for part in tokens])
                sizes = [part.stop - part.start for part in tokens]
                table = batch.page_table[rows]
                plan = attention.plan_attention(table, positions, sizes, ends, batch.page, window, dtype)
                where.poison()
                return fixed_tiles.paged_attention(q, batch.k_cache, batch.v_cache, plan, 0.1, softcap, sinks)

            firsts = [sum(counts[:row]) for row in range(len(counts))]
            everything = [slice(first, first + count) for first, count in zip(firsts, counts, strict=True)]
            whole = attend(list(range(len(lens))), everything, lens)
            close(whole, batch.expected(0.1, window, softcap, sinks), dtype, name)
            singles = [slice(part.stop - 1, part.stop) for part in everything]
            last = torch.tensor([part.start for part in singles], device=where.device)
            equal(attend(list(range(len(lens))), singles, lens), whole[last], f"{name}, decodes together")
            mixed = [part if row % 2 else one for row, (part, one) in enumerate(zip(everything, singles, strict=True))]
            expected = torch.cat([whole[part] for part in mixed])
            equal(attend(list(range(len(lens))), mixed, lens), expected, f"{name}, mixed")
            for row, part in enumerate(everything):
                for size in (1, 7, 33):
                    for start in range(part.start, part.stop, size)[:: 1 if size > 1 else 6]:
                        piece = slice(start, min(start + size, part.stop))
                        end = lens[row] - (part.stop - piece.stop)
                        got = attend([row], [piece], [end])
                        equal(got, whole[piece], f"{name}, row {row}, {size} at a time")


def check_captured_tiles(where: Where) -> None:
    """Lists in one place, filled for one step after another, against those made for each."""
    from quire.kernels.triton.attention import deterministic_tiles as fixed_tiles
    from quire.kernels.triton.attention import paged as attention

    shape = (32, 8, 128) if where.large else (4, 2, 16)
    steps = [([1, 40, 1], [900, 2000, 3]), ([7, 1], [20, 4000]), ([1], [17])] if where.large else [([1, 5], [150, 9])]
    rng = where.random
    for dtype in where.dtypes:
        for window in (None, 600 if where.large else 80):
            page = rng.choice(PAGES)
            work = fixed_tiles.CapturedTiles(64, 4, 2)
            for step, (counts, lens) in enumerate(steps):
                batch = Paged.make(where, dtype, counts, lens, *shape, page)
                missing = 64 - sum(counts)  # tokens that only pad the step
                q = torch.cat((batch.q, where.normal(missing, *shape[::2], dtype=dtype)))
                table = torch.zeros(len(counts), 4096 // page + 1, dtype=torch.int32, device=where.device)
                table[:, : batch.page_table.shape[1]] = batch.page_table
                positions = torch.cat((batch.positions, torch.zeros_like(batch.positions[:1]).expand(missing)))
                results = []
                for made, tokens in ((work, 64), (None, sum(counts))):
                    plan = attention.plan_attention(
                        table, positions[:tokens], counts, lens, page, window, dtype, work=made
                    )
                    if made is not None:
                        if not step:  # the first run sizes the lists; later ones must not read those of another step
                            nothing = fixed_tiles.paged_attention(q, batch.k_cache, batch.v_cache, plan, 0.1)
                            assert not nothing.any()
                        work.fill(counts, lens)
                    out = fixed_tiles.paged_attention(q[:tokens], batch.k_cache, batch.v_cache, plan, 0.1)
                    results.append(out)
                assert not results[0][sum(counts) :].any()
                equal(results[0][: sum(counts)], results[1], f"step {step}, page {page}, window {window} in {dtype}")


def check_fixed_sampling(where: Where) -> None:
    """A filtered row beside others with a grammar and edits, and alone."""
    from quire.kernels.triton.sampling import deterministic as fixed_sampling
    from quire.kernels.triton.sampling import sample

    vocab = 151936 if where.large else 600
    for dtype in where.dtypes:
        logits = where.normal(6, vocab, dtype=dtype) * 3
        keys = torch.arange(6, device=where.device) * 7919
        filters = [torch.tensor(values, device=where.device) for values in (
            [0, 40, 0, 0, 0, 0], [0.9, 1.0, 0.95, 1.0, 1.0, 1.0], [0.0, 0.0, 0.05, 0.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 1.5, 0.0, 0.0])]  # fmt: skip
        filters[1] = filters[1].double()
        inverse = torch.tensor([1.0, 0.8, 1.2, 1.0, 1.1, 0.0], device=where.device)
        mask = torch.full((6, -(-vocab // 32)), -1, dtype=torch.int32, device=where.device)
        mask[3] = 0x55555555
        places = torch.tensor([-1, -1, -1, 0, 1, -1], dtype=torch.int32, device=where.device)
        copies = where.normal(2, vocab)
        for position in range(20 if where.large else 2):
            positions = torch.full((6,), position, device=where.device)
            crowd, _ = fixed_sampling.sample_filtered(
                logits, keys, positions, inverse, *filters, mask=mask, edited=(copies, places)
            )
            plain, _ = sample.sample_rows(logits, keys, positions, inverse)
            assert plain[5] == crowd[5]
            for row in range(3):
                one = slice(row, row + 1)
                alone, _ = fixed_sampling.sample_filtered(
                    logits[one], keys[one], positions[one], inverse[one], *(values[one] for values in filters)
                )
                assert alone[0] == crowd[row], (row, position)


CHECKS: dict[str, Callable[[Where], None]] = {
    "fixed_linear": check_fixed_linear,
    "fixed_attention": check_fixed_attention,
    "captured_tiles": check_captured_tiles,
    "fixed_sampling": check_fixed_sampling,
}
