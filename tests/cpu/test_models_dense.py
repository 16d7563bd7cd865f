"""The dense family against transformers: logits of ragged, chunked, mixed batches over scattered pages."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.files.source import resolve_model
from quire.layers.rope import RopeConfig, inverse_frequencies
from quire.models.loading.loader import LoadedModel, load_model
from tests.cpu.paged_harness import HarnessRow, PagedHarness
from tests.cpu.tiny_models import FAMILIES, make_tiny

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "linear": ("llama", {"rope_parameters": LINEAR}),
    "yarn": ("qwen3", {"rope_parameters": YARN}),
    "yarn-mscale": ("llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False}}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "qwen3-bias": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "two-groups": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "no-window": ("mistral", {"sliding_window": None}),
    "one-kv-head": ("llama", {"num_key_value_heads": 1}),
}


def load(folder: Path, page_tokens: int = 4, kernels: str = "torch") -> LoadedModel:
    files = resolve_model(str(folder))
    cpu = torch.device("cpu")
    return load_model(files, dtype="auto", device=cpu, max_model_len=None, page_tokens=page_tokens, kernels=kernels)


def assert_close(got: Tensor, want: Tensor) -> None:
    assert got.dtype == torch.float32
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


def run_mixed(harness: PagedHarness, rows: list[HarnessRow], seed: int) -> list[Tensor]:
    """Random steps until every row is computed: some rows take chunks of 7, some one token, some sit out."""
    rng = random.Random(seed)
    logits: list[list[Tensor]] = [[] for _ in rows]
    while any(row.computed < len(row.tokens) for row in rows):
        behind = [row for row in rows if row.computed < len(row.tokens)]
        chosen = rng.sample(behind, rng.randint(1, len(behind)))
        work = [(row, min(rng.choice((1, 1, 7)), len(row.tokens) - row.computed)) for row in chosen]
        out = harness.step(work).split([count for _, count in work])
        for (row, _), part in zip(work, out, strict=True):
            logits[next(i for i, other in enumerate(rows) if other is row)].append(part)
            harness.ruin_beyond_window(row)
    return [torch.cat(parts) for parts in logits]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_in_mixed_batches(variant: str, tmp_path: Path) -> None:
    """In plain torch, as one native call, and through the native ops one by one."""
    family, overrides = VARIANTS[variant]
    reference, folder = make_tiny(family, tmp_path, **overrides)
    native: Any = load(folder, kernels="auto").model
    by_ops: Any = load(folder, kernels="auto").model
    by_ops.__dict__["stack"] = None
    for model in (load(folder).model, native, by_ops):
        seed = 11
        rng = random.Random(seed)
        rows = [HarnessRow([rng.randrange(256) for _ in range(size)]) for size in (1, 19, 40, 7, 33, 64)]
        got = run_mixed(PagedHarness(model, num_pages=80, seed=seed, bound_slack=6), rows, seed)
        with torch.inference_mode():
            for row, logits in zip(rows, got, strict=True):
                assert_close(logits, reference(torch.tensor([row.tokens])).logits[0])


@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen3"])
def test_greedy_decode_of_sixteen_rows_equals_transformers(family: str, tmp_path: Path) -> None:
    reference, folder = make_tiny(family, tmp_path)
    model = load(folder, page_tokens=16).model
    rng = random.Random(5)
    rows = [HarnessRow([rng.randrange(256) for _ in range(rng.randint(1, 30))]) for _ in range(16)]
    prompts = [list(row.tokens) for row in rows]
    harness = PagedHarness(model, num_pages=64, seed=5)
    logits = harness.step([(row, len(row.tokens)) for row in rows])
    last = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
    logits = logits[last]
    for _ in range(24):
        for row, token in zip(rows, logits.argmax(-1).tolist(), strict=True):
            row.tokens.append(token)
        logits = harness.step([(row, 1) for row in rows])
    for row, prompt in zip(rows[::5], prompts[::5], strict=True):
        with torch.inference_mode():
            want = reference(torch.tensor([row.tokens])).logits[0].argmax(-1).tolist()
        assert row.tokens[len(prompt) :] == want[len(prompt) - 1 : -1]


def test_groups_follow_the_windows(tmp_path: Path) -> None:
    make_tiny("qwen2", tmp_path, use_sliding_window=True, sliding_window=9, max_window_layers=1)
    specs = load(tmp_path).model.specs
    assert [(spec.group, spec.layers, spec.window) for spec in specs] == [("full", (0,), None), ("window", (1, 2), 9)]
    assert {spec.shape for spec in specs} == {(2, 16)}
    assert {spec.dtype for spec in specs} == {"float32"}


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    make_tiny("smollm2", tmp_path)
    loaded = load(tmp_path)
    model: Any = loaded.model
    assert model.head.linear.weight.data_ptr() == model.embedding.weight.data_ptr()
    total = sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values())
    assert loaded.weights_bytes == total
    packed: Any = load(tmp_path, kernels="auto")
    assert packed.model.head.linear.weight is packed.model.embedding.weight
    assert packed.weights_bytes == total


def test_rope_divisors_divide_the_frequencies() -> None:
    plain = inverse_frequencies(RopeConfig(), 8)
    divided = inverse_frequencies(RopeConfig(divisors=(1.0, 2.0, 4.0, 8.0)), 8)
    torch.testing.assert_close(divided * torch.tensor([1.0, 2.0, 4.0, 8.0]), plain)
