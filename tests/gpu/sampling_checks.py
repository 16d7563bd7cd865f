"""The sampling kernels against float64 oracles and against the sampler's own reference; run as `kernel_checks` is.

Cuts are moved a little outwards and inwards: what is drawn must lie within the wider set, and no token of the narrower
one may beat it by more than the noise's hardware logarithms explain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quire.kernels.table import triton_sampling
from quire.kernels.validation.failures import LazyKernels
from quire.sampling.edits import apply_edits
from quire.sampling.fused import ALL_KERNELS, FusedSampling
from quire.sampling.logprobs import score
from quire.sampling.noise import Noise, stream_key
from quire.sampling.sampler import Sampler, processed_logits
from tests.cpu.sampling_cases import Case, random_case, resolved, set_up
from tests.gpu.where import Where

EDGE = 1e-5
CLOSE = 2e-4
MINUS_INF = -torch.inf


@dataclass
class Asked:
    """Filters of each sample, as lists that `add` lengthens."""

    inv_temperature: list[float] = field(default_factory=list)
    top_k: list[int] = field(default_factory=list)
    top_p: list[float] = field(default_factory=list)
    min_p: list[float] = field(default_factory=list)
    top_n_sigma: list[float] = field(default_factory=list)

    def add(self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
            top_n_sigma: float = 0.0) -> None:  # fmt: skip
        self.inv_temperature.append(1 / temperature if temperature else 0.0)
        self.top_k.append(top_k)
        self.top_p.append(top_p)
        self.min_p.append(min_p)
        self.top_n_sigma.append(top_n_sigma)

    def tensors(self, device: str) -> tuple[Tensor, ...]:
        kinds = (torch.float32, torch.int64, torch.float64, torch.float32, torch.float32)
        lists = (self.inv_temperature, self.top_k, self.top_p, self.min_p, self.top_n_sigma)
        return tuple(torch.tensor(x, dtype=kind, device=device) for x, kind in zip(lists, kinds, strict=True))


def kept_tokens(logits: Tensor, scale: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, sigma: Tensor,
                edge: float) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Distances below the best [rows, vocab] float64 and which tokens the filters keep, with a sort."""
    logits = logits.float()
    distances = ((logits.amax(1, keepdim=True) - logits) * scale[:, None]).double()
    kept = distances < torch.inf
    k = torch.where(top_k > 0, top_k, logits.shape[1])[:, None]
    kept &= distances <= distances.sort(1).values.gather(1, k - 1)
    finite = logits > MINUS_INF
    wide = logits.double().masked_fill(~finite, 0)
    mean = wide.sum(1, keepdim=True) / finite.sum(1, keepdim=True)
    deviation = ((wide - mean).square() * finite).sum(1, keepdim=True).div(finite.sum(1, keepdim=True)).sqrt()
    width = sigma.double()[:, None]
    kept &= (width == 0) | (distances <= width * deviation * scale.double()[:, None] * (1 + edge))
    weights, order = torch.where(kept, distances, torch.inf).neg().exp().sort(1, descending=True)
    before = weights.cumsum(1) - weights
    share = (top_p + edge).clamp(1e-30, 1.0)[:, None]
    inside = (before < share * weights.sum(1, keepdim=True)) & (weights > 0)
    last = distances.gather(1, order).masked_fill(~inside, 0).amax(1, keepdim=True)
    kept &= (top_p[:, None] >= 1) | (distances <= last)
    kept &= (min_p[:, None] == 0) | (distances <= -min_p.double()[:, None].log() + edge * (1 + distances))
    return distances, kept


def check_choice(tokens: Tensor, logits: Tensor, keys: Tensor, positions: Tensor, asked: tuple[Tensor, ...],
                 what: str) -> None:  # fmt: skip
    """Rows of `logits` are as they are after mask and edits, and none is bad."""
    greedy = asked[0] == 0
    assert torch.equal(tokens[greedy], logits[greedy].float().argmax(1)), f"{what}: greedy"
    keys, positions, logits, tokens = (x[~greedy] for x in (keys, positions, logits, tokens))
    asked = tuple(x[~greedy] for x in asked)
    noise = Noise(logits.shape[1], logits.device).gumbel(keys, positions).double()
    distances, surely = kept_tokens(logits, *asked, -EDGE)
    _, perhaps = kept_tokens(logits, *asked, EDGE)
    surely |= distances == 0  # the best token is kept by every filter
    scores = noise - distances
    drawn = scores.gather(1, tokens[:, None])
    wrong = ~perhaps.gather(1, tokens[:, None])[:, 0]
    assert not wrong.any(), f"{what}: drew what is not kept in rows {wrong.nonzero()[:, 0].tolist()}"
    gap = (scores.masked_fill(~surely, MINUS_INF).amax(1, keepdim=True) - drawn)[:, 0]
    # A distance of thousands (tiny temperatures) has no finer steps than this in float32.
    assert (gap <= CLOSE + 1e-6 * distances.gather(1, tokens[:, None])[:, 0]).all(), (
        f"{what}: {gap.max()} below the best"
    )


def random_filters(where: Where, count: int, vocab: int) -> Asked:
    rng, asked = where.random, Asked()
    for _ in range(count):
        given = {
            "top_k": rng.choice([2, 5, 20, 50, 300, vocab // 2, vocab - 1]),
            "top_p": rng.choice([1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 1e-9, rng.random() * 0.98 + 0.01]),
            "min_p": rng.choice([0.02, 0.1, 0.5, 1.0]),
            "top_n_sigma": rng.choice([0.3, 1.0, 2.5]),
        }
        chosen = {name: value for name, value in given.items() if rng.random() < 0.4}
        asked.add(rng.choice([0.0, 0.01, 0.3, 0.7, 1.0, 1.0, 3.0]), **chosen)
    return asked


def random_logits(where: Where, count: int, vocab: int, dtype: torch.dtype) -> Tensor:
    """Peaked, flat, tied, and with holes: a kind for each row in turn."""
    logits = where.normal(count, vocab)
    kinds = torch.arange(count, device=where.device)[:, None] % 5
    spread = torch.where(kinds == 0, 4.0, torch.where(kinds == 1, 0.05, 1.5))
    logits = logits * spread
    logits = torch.where(kinds == 2, (logits * 2).round() / 2, logits)
    holes = (kinds == 3) & (torch.rand(count, vocab, device=where.device) < 0.9)
    return logits.masked_fill_(holes, MINUS_INF).to(dtype)


def packed_mask(where: Where, count: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Random bits and which tokens they allow; the last row allows one token."""
    words = torch.randint(-(2**31), 2**31 - 1, (count, -(-vocab // 32)), dtype=torch.int32, device=where.device)
    words[-1] = 0
    words[-1, (vocab - 2) // 32] = 1 << ((vocab - 2) % 32) if (vocab - 2) % 32 < 31 else -(2**31)
    bits = (words[:, :, None] >> torch.arange(32, device=where.device, dtype=torch.int32)) & 1
    return words, bits.flatten(1)[:, :vocab].bool()


def check_filters(where: Where) -> None:
    from quire.kernels.triton.sampling.filters import sample_filtered

    sizes = [(1, 151936), (256, 151936), (40, 50257), (7, 262144)] if where.large else [(9, 1100), (7, 801)]
    for index, (count, vocab) in enumerate(sizes):
        for dtype in where.dtypes if where.large else where.dtypes[index : index + 1]:
            logits = random_logits(where, count, vocab, dtype)
            keys = torch.tensor([stream_key(seed, 1) for seed in range(count)], device=where.device)
            positions = torch.randint(0, 9999, (count,), device=where.device)
            asked = random_filters(where, count, vocab).tensors(where.device)
            words, allowed = packed_mask(where, count, vocab)
            logits[:, vocab - 2] = 1.0  # which the last row's mask allows
            ways = ((None, logits), (words, logits.masked_fill(~allowed, MINUS_INF)))
            for given, wanted in ways if where.large else ways[index : index + 1]:
                alive = wanted.isfinite().any(1)
                where.poison()
                tokens, bad = sample_filtered(logits, keys, positions, *asked, mask=given)
                assert torch.equal(bad, ~alive)
                here = (x[alive] for x in (tokens, wanted, keys, positions))
                check_choice(*here, tuple(x[alive] for x in asked), f"{count} x {vocab} in {dtype}")
                some = torch.tensor([0, count - 1], device=where.device)
                part = None if given is None else given[some]
                alone, _ = sample_filtered(logits[some], keys[some], positions[some], *(x[some] for x in asked),
                                           mask=part)  # fmt: skip
                assert torch.equal(alone, tokens[some]), "neighbours change a token"


def check_filter_cuts(where: Where) -> None:
    """Few tokens, all likely, so that a cut one token off is soon drawn: in few groups, and in more than are listed."""
    from quire.kernels.triton.sampling.filters import LISTED, sample_filtered

    num_many, repeats = 2 * LISTED + 10, 20 if where.large else 1
    vocab = 32 * num_many
    few = torch.full((vocab,), -50.0, device=where.device)
    # All in two groups, whose best alone don't tell where a cut is.
    shares = torch.tensor([0.30, 0.12, 0.18, 0.22, 0.08, 0.06, 0.04], device=where.device)
    few[torch.tensor([64, 66, 95, 79, 192, 201, 223], device=where.device)] = shares.log()
    many = torch.full((num_many, 32), -50.0, device=where.device)
    order = torch.randperm(num_many, device=where.device)
    # A token in every group, in three steps of equal ones: 37%, 33% and 30% of the weight.
    many[torch.arange(num_many, device=where.device), order % 32] = -0.1 * (order * 3 // num_many)
    two_steps = 2 * num_many // 3
    # Shares just below what the tokens add up to, and temperatures at which top-k's tokens are all alike.
    hot: dict[str, float] = {"temperature": 50.0}
    narrow = [{**hot, "top_k": 2}, {**hot, "top_k": 3}, {**hot, "top_k": 5}, {"top_p": 0.51}, {"top_p": 0.69},
              {"top_k": 4, "top_p": 0.62}, {"min_p": 0.5}]  # fmt: skip
    wide = [{"top_k": two_steps}, {"top_k": two_steps}, {"top_p": 0.69}, {"min_p": 0.86}, {"top_n_sigma": 0.0172},
            {"top_k": two_steps, "top_p": 0.51}, {"top_n_sigma": 0.0172, "top_p": 0.51}]  # fmt: skip
    asked, rows = Asked(), []
    kinds = [(few, kind) for kind in narrow * (2 * repeats)] + [(many, kind) for kind in wide * (2 * repeats)]
    for logits, kind in kinds:
        asked.add(**kind)
        rows.append(logits.view(-1))
    logits, tensors = torch.stack(rows), asked.tensors(where.device)
    keys = torch.arange(len(rows), device=where.device) * 104729
    tokens, bad = sample_filtered(logits, keys, keys, *tensors)
    assert not bad.any()
    check_choice(tokens, logits, keys, keys, tensors, "cuts")


def check_filter_edges(where: Where) -> None:
    """Bad rows, equal logits, one token, and cuts that fall among ties."""
    from quire.kernels.triton.sampling.filters import sample_filtered

    vocab = 40000 if where.large else 700
    kinds = [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 1e-5, "top_p": 0.9}, {"temperature": 0.0},
             {"top_p": 1e-60}, {"top_k": 600, "top_p": 0.3}, {"top_n_sigma": 1.0},
             {"top_n_sigma": 1.0, "top_p": 0.5}]  # fmt: skip
    for kind in kinds if where.large else kinds[:6]:
        logits = where.normal(8, vocab)
        logits[1, vocab - 7] = torch.nan
        logits[2, 3] = torch.inf
        logits[3] = MINUS_INF
        logits[4] = MINUS_INF
        logits[4, vocab - 1] = -5.0
        logits[5] = 2.5
        logits[6] = torch.arange(vocab, device=where.device) % 2
        logits[7] = (torch.arange(vocab, device=where.device) % 3 == 1) * -1e30
        asked = Asked()
        for _ in range(8):
            asked.add(**kind)
        tensors = asked.tensors(where.device)
        keys = torch.arange(8, device=where.device) * 7777777
        where.poison()
        tokens, bad = sample_filtered(logits, keys, keys, *tensors)
        assert bad.tolist() == [False, True, True, True, False, False, False, False], kind
        assert tokens[1:4].tolist() == [0, 0, 0] and tokens[4] == vocab - 1, kind
        fine = ~bad
        check_choice(tokens[fine], logits[fine], keys[fine], keys[fine], tuple(x[fine] for x in tensors), str(kind))


EDITS = ("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "dry", "min_tokens", "bad_words")


def check_edits(where: Where) -> None:
    """Copies of the samples that ask. Cells that no edit touches are the model's own to the last bit; the others are
    the reference's, but for half a unit in the last place of what was added up, each time that something was: DRY adds
    in no fixed order, and what tokens cost by their number is taken off once for each."""
    ops = triton_sampling()
    assert ops is not None
    rng = np.random.default_rng(where.seed)
    for vocab, count in ((151936, 64), (300, 40)) if where.large else ((60, 8), (333, 8)):
        for dtype in where.dtypes:
            cases = [Case(resolved()), random_case(rng, vocab, "dry")]
            cases += [random_case(rng, vocab, *(name for name in EDITS if rng.random() < 0.4), "temperature")
                      for _ in range(count)]  # fmt: skip
            long = [int(i) for i in rng.integers(0, vocab, 3000 if where.large else 100)]
            penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.3}
            cases += [Case(resolved(**penalties), long[:9], long[9:] + long[:50]), Case(resolved(**penalties), long),
                      random_case(rng, vocab, "dry")]  # fmt: skip
            logits = where.normal(len(cases), vocab, dtype=dtype) * 4
            logits[1, 5], logits[2, 7] = torch.nan, MINUS_INF
            batch, histories = set_up(cases, vocab, rng, where.device)
            expected = apply_edits(logits.float(), batch, histories)
            assert batch.edited is not None
            where.poison()
            fused = FusedSampling(ops, Sampler(vocab, where.device)._choose, LazyKernels(ALL_KERNELS))
            copies, places = fused.edit(logits, batch, batch.edited, histories)
            assert places[0] == -1 and len(copies) < len(cases)
            samples = batch.edited.samples
            own, wanted = logits.float()[samples], expected[samples]
            times = torch.stack([torch.tensor(cases[i].history).bincount(minlength=vocab) for i in samples.tolist()])
            added_up = 2 * own.abs() + wanted.nan_to_num(neginf=0.0).abs() + 4.0  # the largest bias
            allowed = 2.0**-24 * (times.to(where.device) + 4) * added_up
            right = (copies == wanted) | (copies.isnan() & wanted.isnan())
            right |= (wanted != own) & ((copies - wanted).abs() <= allowed)
            assert bool(right.all()), f"cells {(~right).nonzero()[:3].tolist()} of {vocab}, {dtype}"


def check_logprobs(where: Where) -> None:
    from quire.kernels.triton.sampling.logprobs import score_rows

    sizes = [(256, 151936), (1, 151936), (9, 50257)] if where.large else [(4, 1000), (3, 50)]
    for index, (count, vocab) in enumerate(sizes):
        for dtype in where.dtypes if where.large else where.dtypes[index : index + 1]:
            logits = where.normal(count, vocab, dtype=dtype) * 3
            logits[count // 2] = (logits[count // 2] * 2).round() / 2  # ties
            logits[0, : vocab - 7] = MINUS_INF
            tokens = torch.randint(0, vocab, (count,), device=where.device)
            tokens[0] = vocab - 1
            for num_top in (0, 1, 5, 20, 64) if where.large else (0, 3, 20):
                samples = torch.tensor([count - 1, 0], device=where.device) if num_top == 5 else None
                where.poison()
                ids, logprob, rank, top_ids, top_logprobs = score_rows(logits, samples, tokens, num_top)
                part = logits if samples is None else logits[samples]
                wanted = score(part.double(), tokens if samples is None else tokens[samples], num_top)
                assert torch.equal(ids, wanted.token_ids) and torch.equal(rank, wanted.rank)
                torch.testing.assert_close(logprob.double(), wanted.logprob, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(top_logprobs.double(), wanted.top_logprobs, rtol=1e-5, atol=1e-5)
                # Among equals any may stand there, but each once, and with its own value.
                assert torch.equal(part.gather(1, top_ids), part.float().topk(min(num_top, vocab)).values.to(dtype))
                assert all(len(set(row)) == len(row) for row in top_ids.tolist())
                steps = part.gather(1, top_ids)
                tied = steps[:, 1:] == steps[:, :-1]
                assert (top_ids[:, 1:] > top_ids[:, :-1])[tied].all(), "equals in the order of their ids"


def check_sampler(where: Where) -> None:
    """Whole steps through `Sampler`, everything mixed, against the torch reference: the same tokens but at near-ties,
    and tokens that the reference may draw."""
    rng = np.random.default_rng(where.seed)
    differ = total = 0
    for vocab, count in ((32000, 128), (151936, 64)) if where.large else ((700, 12),):
        cases = [random_case(rng, vocab) for _ in range(count)]
        cases += [random_case(rng, vocab, "greedy"), random_case(rng, vocab, "temperature"),
                  Case(resolved(top_k=20, top_p=0.95, temperature=0.6, logprobs=5))]  # fmt: skip
        logits = where.normal(len(cases), vocab) * 3
        batch, histories = set_up(cases, vocab, rng, where.device)
        words, _ = packed_mask(where, len(cases), vocab)
        words[:, ::2] = -1
        for mask in (None, words):
            fused = Sampler(vocab, where.device, triton_sampling(), irreplaceable=ALL_KERNELS).sample(
                logits, batch, histories, mask
            )
            plain = Sampler(vocab, where.device).sample(logits, batch, histories, mask)
            drawn = processed_logits(logits, batch, histories, mask)
            assert torch.equal(fused.bad, plain.bad)
            fine = ~plain.bad
            differ += int((fused.tokens != plain.tokens).sum())
            total += len(cases)
            kept = drawn.gather(1, fused.tokens[:, None])[:, 0].isfinite()
            assert (kept | ~fine).float().mean() > 0.98, "drew what the reference does not keep"
            assert fused.logprobs is not None and plain.logprobs is not None
            torch.testing.assert_close(fused.logprobs.top_logprobs, plain.logprobs.top_logprobs, rtol=1e-5, atol=1e-5)
    assert differ <= 0.02 * total, f"{differ} of {total} tokens differ"


CHECKS: dict[str, Callable[[Where], None]] = {
    "filters": check_filters,
    "filter_cuts": check_filter_cuts,
    "filter_edges": check_filter_edges,
    "edits": check_edits,
    "logprobs": check_logprobs,
    "sampler": check_sampler,
}
