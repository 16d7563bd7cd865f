"""The fallback model with layers that keep a state, and with attention that can't be replaced: batches of rows, notes
and refusals. `families/others_keeping.py` shows that its results are right.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.files.source import resolve_model
from quire.layers.step import PagedInputs, StateInputs, Step
from quire.models.fallback import model as fallback
from quire.models.fallback.build import build_on_meta, make_weights
from quire.models.fallback.dry_run import (
    CALL_BYTES,
    CALL_TOKENS,
    MAX_CALL_TOKENS,
    MIN_CALL_TOKENS,
    find_cache_layout,
    measure_call,
)
from quire.models.fallback.gathered_attention import GatheredRow
from quire.models.fallback.recurrent_states import (
    RowStates,
    StateRecorder,
    StateSlots,
    StateTensor,
    split_rows,
)
from quire.models.loading.loader import build_model, load_model
from quire.types import QuireError
from tests.cpu.families.harness import Family, relative_error, save_checkpoint
from tests.cpu.families.more_types import small_config
from tests.cpu.families.others import draw_ln
from tests.cpu.paged_harness import assert_equals_transformers

CPU = torch.device("cpu")


def save(kind: str, folder: Path, **changes: Any) -> Any:
    config = small_config(kind)
    for name, value in changes.items():
        setattr(config, name, value)
    return save_checkpoint(Family(kind, lambda: config, draw_ln), folder)


def load(folder: Path) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loaded = load_model(resolve_model(str(folder)), dtype="float32", device=CPU, max_model_len=None, page_tokens=4)
    return loaded.model, [str(each.message) for each in said]


# ---------------------------------------------------------------------------------------------------------------------
# Rows that are put together


def step_of(counts: list[int], starts: list[int]) -> Step:
    """Tokens are 100 * row + position; a row's slot is 10 + row, its pages 5 * row and what follows."""
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    positions = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
    tokens = torch.cat([100 * row + part for row, part in enumerate(positions)])
    pages = torch.arange(5 * len(counts), dtype=torch.int32).view(-1, 5)
    groups = {"state": StateInputs(10 + torch.arange(len(counts))), "full": PagedInputs(pages, tokens + 7)}
    query_starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
    return Step(tokens, torch.cat(positions), query_starts, torch.tensor(ends, dtype=torch.int32),
                query_starts[1:].long() - 1, groups, counts, ends)  # fmt: skip


def check_part(part: Step, whole: Step, of_tokens: Any) -> list[int]:
    """A step whose every part is of the same rows. Returns the rows."""
    rows = sorted({int(token) // 100 for token in part.tokens})
    assert part.counts == [len(part.tokens) // len(rows)] * len(rows)
    assert part.query_starts.tolist() == [n * part.counts[0] for n in range(len(rows) + 1)]
    assert part.seq_lens.tolist() == part.len_bounds == [int(p) + 1 for p in part.positions[part.logits_index]]
    states, pages = part.groups["state"], part.groups["full"]
    assert isinstance(states, StateInputs) and states.slots.tolist() == [10 + row for row in rows]
    assert isinstance(pages, PagedInputs) and pages.page_table[:, 0].tolist() == [5 * row for row in rows]
    assert torch.equal(pages.slots, part.tokens + 7)
    assert torch.equal(part.tokens % 100, part.positions)
    assert of_tokens is None or torch.equal(whole.tokens[of_tokens], part.tokens)
    return rows


@pytest.mark.parametrize(("counts", "starts", "continues_states", "apart", "expected"), [
    ([1, 1, 1], [4, 9, 0], True, False, [([0, 1, 2], 1)]),  # all that decode, and a prompt of one token
    ([3, 1, 3, 1], [0, 5, 4, 7], True, False, [([0, 2], 3), ([1, 3], 1)]),
    ([3, 1, 3, 1], [0, 5, 4, 7], False, False, [([0], 3), ([1, 3], 1), ([2], 1), ([2], 1), ([2], 1)]),
    ([2, 2], [4, 8], False, False, [([0, 1], 1), ([0, 1], 1)]),
    ([5], [0], False, False, [([0], 5)]),
    ([2, 1, 1], [3, 4, 5], True, True, [([0], 2), ([1], 1), ([2], 1)]),
    ([20, 20, 6], [0, 3, 0], True, False, [([0], 8), ([0], 8), ([0], 4), ([1], 8), ([1], 8), ([1], 4), ([2], 6)]),
    ([3, 3, 3], [0, 1, 2], True, False, [([0, 1], 3), ([2], 3)]),  # more would be too many for a call
    ([10, 3], [0, 2], False, False, [([0], 8), ([0], 1), ([0], 1), ([1], 1), ([1], 1), ([1], 1)]),
    ([1] * 10, [3] * 10, True, False, [(list(range(10)), 1)]),  # decodes stay together
])  # fmt: skip
def test_rows_of_equal_length_are_a_batch(counts: list[int], starts: list[int], continues_states: bool, apart: bool,
                                          expected: list[tuple[list[int], int]]) -> None:  # fmt: skip
    whole = step_of(counts, starts)
    found, seen = [], []
    for part, of_tokens in split_rows(whole, continues_states, apart, most=8):
        found.append((check_part(part, whole, of_tokens), part.counts[0]))
        assert (of_tokens is None) == (part is whole)
        seen += part.tokens.tolist()
    assert found == expected
    assert sorted(seen) == whole.tokens.tolist(), "every token once"


def test_rows_that_begin_may_be_apart_and_batches_small() -> None:
    whole = step_of([1, 1, 2, 1, 2, 1], [4, 0, 0, 9, 3, 6])
    parts = list(split_rows(whole, True, False, most=8, separate_beginnings=True, most_rows=2))
    assert [check_part(part, whole, of_tokens) for part, of_tokens in parts] == [[0, 3], [5], [1], [2], [4]]
    parts = list(split_rows(whole, False, False, most=8, separate_beginnings=True))
    assert [check_part(part, whole, of_tokens) for part, of_tokens in parts] == [[0, 3, 5], [1], [2], [4], [4]]


def test_slots_give_back_what_was_put_in() -> None:
    """Several tensors a layer, of types of their own; layers that keep less are in another group."""
    kept = StateTensor((2, 3), None), StateTensor((4,), torch.float64)
    slots = StateSlots.of({0: {("conv", 0): kept[0], ("recurrent", 0): kept[1]}, 3: {("conv", 0): kept[0]},
                           5: {("conv", 0): kept[0]}}, torch.float16, page_tokens=4)  # fmt: skip
    assert [(spec.layers, spec.shape, spec.snapshot_tokens) for spec in slots.specs] == [
        ((0,), (10,), 1024), ((3, 5), (6,), 1024)]  # fmt: skip
    step = step_of([1, 1], [3, 4])
    step.groups.update({spec.group: StateInputs(torch.tensor([6, 2])) for spec in slots.specs})
    caches = {spec.group: torch.randn(len(spec.layers), 8, *spec.shape).half().float() for spec in slots.specs}
    before = {name: cache.clone() for name, cache in caches.items()}
    rows = RowStates(slots, step, caches)
    assert rows.get_conv_state(0).dtype == torch.float16 and rows.get_recurrent_state(0).dtype == torch.float64
    assert rows.layers[3].conv_states[0].shape == (2, 2, 3) and rows.get_recurrent_state(5) is None
    rows.flush()
    assert all(torch.equal(caches[name], before[name]) for name in caches)
    rows.update_conv_state(torch.full((2, 2, 1), 9.0), 3)
    rows.update_recurrent_state(torch.full((2, 4), 7.0), 0)  # what layer 3 has left is in its slots by now
    assert not torch.equal(caches[slots.specs[1].group], before[slots.specs[1].group])
    rows.flush()
    name = slots.specs[1].group
    assert torch.equal(caches[name][0, 6], torch.tensor([*before[name][0, 6, 1:3], 9, *before[name][0, 6, 4:], 9]))
    assert torch.equal(caches[name][1], before[name][1])
    assert caches[slots.specs[0].group][0, 2, 6:].tolist() == [7.0] * 4


def test_a_rehearsal_notes_shapes_and_types() -> None:
    noted = StateRecorder(torch.bfloat16)
    noted.update_conv_state(torch.zeros(1, 6, 2, dtype=torch.bfloat16), 1, conv_kernel_size=4)
    noted.update_recurrent_state(torch.zeros(1, 2, 3), 1, state_idx=1)
    noted.set_linear_cache(2, torch.zeros(1, 5, dtype=torch.bfloat16))
    assert noted.layers == {
        1: {("conv", 0): StateTensor((6, 4), None), ("recurrent", 1): StateTensor((2, 3), torch.float32)},
        2: {("recurrent", 0): StateTensor((5,), None)},
    }


def test_memory_is_set_aside_for_what_a_call_takes() -> None:
    """A scan in plain torch takes far more than its activations; attention of its own takes scores of all positions."""
    scans, attends, swaps = (build_model(small_config(kind).to_dict(), dtype="float32", device=CPU, page_tokens=4)[0]
                             for kind in ("mamba", "gptj", "gpt2"))  # fmt: skip
    config = small_config("mamba")
    states = config.intermediate_size * config.state_size * 4
    assert 4 * CALL_BYTES >= scans.work_bytes(1) >= 3 * MAX_CALL_TOKENS * states, "of every token"
    assert scans.work_bytes(9) - scans.work_bytes(1) == 4 * 8 * (states + config.intermediate_size * 4 * 4)
    assert attends.work_bytes(1) == attends.work_bytes(9) >= 3 * CALL_TOKENS * 4 * 512 * 4, "scores"
    assert swaps.work_bytes(9) == 0


@pytest.mark.parametrize(("max_len", "call_tokens"), [(512, CALL_TOKENS), (2**20, 64), (2**24, MIN_CALL_TOKENS)])
def test_long_contexts_have_shorter_calls(max_len: int, call_tokens: int) -> None:
    config = small_config("gptj")
    found, num_bytes = measure_call(config, find_cache_layout(config), torch.float32, max_len)
    assert found == call_tokens and num_bytes >= call_tokens * 4 * max_len * 4


@pytest.mark.parametrize("kind", ["bailing_hybrid", "zamba2", "zaya", "mamba", "jamba"])
def test_who_can_not_go_on_is_found_whatever_the_weights(kind: str, tmp_path: Path) -> None:
    """Small ones, with which nearly nothing is kept of a few tokens: logits would not tell."""
    config = small_config(kind)

    def draw(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
        draw_ln(name, parameter, generator)
        if "norm" not in name:
            parameter *= 0.1

    save_checkpoint(Family(kind, lambda: config, draw), tmp_path)
    assert load(tmp_path)[0].continues_states == (kind not in ("mamba", "jamba"))


@pytest.mark.parametrize("kind", ["gpt2", "bailing_hybrid"])
def test_rows_that_stand_for_nobody_disturb_nobody(kind: str, tmp_path: Path) -> None:
    """A captured step is padded with rows at position -1, whose page is -1 and whose state is in slot 0, which is
    nobody's."""
    save(kind, tmp_path)
    model, _ = load(tmp_path)
    logits = []
    for padded in (False, True):
        caches = {spec.group: fallback._empty_cache(spec, 3, 6, CPU) for spec in model.specs}
        for span in ((0, 5), (5, 6), (6, 7)):
            step = fallback._probe_step(model.specs, torch.arange(14).view(2, 7), *span)
            for inputs in step.groups.values():
                inputs.slots += 1 if isinstance(inputs, StateInputs) else 4
                if isinstance(inputs, PagedInputs):
                    inputs.page_table += 1
            if padded and span[0] > 0:
                step.positions[1], step.seq_lens[1], step.len_bounds[1] = -1, 0, 1
                for inputs in step.groups.values():
                    inputs.slots[1] = 0 if isinstance(inputs, StateInputs) else -1
            hidden = model.forward(step, caches)
        logits.append(model.logits(hidden)[0])
    assert relative_error(*logits) <= 1e-5


def test_how_long_a_sequence_may_be() -> None:
    for kind, given, expected in (("mamba", {}, 65536), ("bloom", {"seq_length": 77}, 77),
                                  ("bailing_hybrid", {}, 512)):  # fmt: skip
        config = {**small_config(kind).to_dict(), **given}
        if kind != "bailing_hybrid":
            config.pop("max_position_embeddings", None)
        assert build_model(config, dtype="float32", device=CPU, page_tokens=4)[0].max_positions == expected, kind


# ---------------------------------------------------------------------------------------------------------------------
# What is said and what is refused


def test_who_waits_longer_is_told(tmp_path: Path) -> None:
    for kind in ("bailing_hybrid", "mamba", "gptj"):
        save(kind, tmp_path / kind)
    slower = "has no family of its own: it runs through transformers, correctly but slower"
    assert load(tmp_path / "bailing_hybrid")[1] == [f"bailing_hybrid {slower}."]
    said = load(tmp_path / "mamba")[1]
    assert said[0] == f"mamba {slower}." and "is computed token by token" in said[1] and len(said) == 2
    assert load(tmp_path / "gptj")[1] == [f"gptj {slower}, with its own attention, one row at a time."]


@pytest.mark.parametrize(("kind", "owner", "method"), [
    ("bailing_hybrid", RowStates, "update_conv_state"), ("zamba2", RowStates, "update_recurrent_state"),
    ("gptj", GatheredRow, "update"),
])  # fmt: skip
def test_what_it_gets_wrong_is_refused(kind: str, owner: Any, method: str, tmp_path: Path,
                                       monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    save(kind, tmp_path)
    real = getattr(owner, method)

    def wrong(self: Any, first: torch.Tensor, *others: Any, **more: Any) -> Any:
        return real(self, 1.2 * first, *others, **more)

    monkeypatch.setattr(owner, method, wrong)
    with pytest.raises(QuireError, match=f"{kind} can't run through transformers here: its logits differ by"):
        load(tmp_path)


def test_what_fails_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("bailing_hybrid", tmp_path)

    def fail(*given: Any, **more: Any) -> None:
        raise AttributeError("no such thing\nat all")

    monkeypatch.setattr(RowStates, "update_conv_state", fail)
    with pytest.raises(
        QuireError, match=r"bailing_hybrid can't run .*: it fails with paged attention: no such thing"
    ) as caught:
        load(tmp_path)
    assert caught.value.code == "unsupported_model" and "\n" not in str(caught.value)


@pytest.mark.parametrize(("change", "words"), [
    (None, r"but no .*k_conv1d\.weight beside it"),
    ((31, 1, 4), r"conv1d\.weight.* in the wrong shape"),
    ((32, 2, 4), r"[qkv]_conv1d\.weight in the wrong shape"),
])  # fmt: skip
def test_parts_of_a_convolution_that_do_not_fit_are_named(change: Any, words: str, tmp_path: Path) -> None:
    save("bailing_hybrid", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.attention.k_conv1d.weight"
    assert tensors.pop(name).shape == (32, 1, 4)
    if change is not None:
        tensors[name] = torch.zeros(change)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(QuireError, match=words) as caught:
        load(tmp_path)
    assert caught.value.code == "bad_weights" and "\n" not in str(caught.value)


@pytest.mark.parametrize(("dtype", "both"), [(torch.bfloat16, False), (torch.float16, True)])
def test_weights_that_want_float32_are_kept_so(dtype: torch.dtype, both: bool,
                                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    causal = build_on_meta(small_config("bailing_hybrid"), dtype, "eager")
    monkeypatch.setattr(causal, "_keep_in_fp32_modules_strict", {"conv1d"}, raising=False)
    monkeypatch.setattr(causal, "_keep_in_fp32_modules", ["o_proj"], raising=False)
    make_weights(causal, dtype)
    wanted = (".conv1d.", ".o_proj.") if both else (".conv1d.",)
    assert all(any(part in name for name, _ in causal.named_parameters()) for part in wanted)
    for name, weight in causal.named_parameters():
        assert weight.dtype == (torch.float32 if any(part in name for part in wanted) else dtype), name


def test_layers_that_share_keys_are_right(tmp_path: Path) -> None:
    """Gemma 3n: the last layers attend to the keys of earlier ones."""
    layers = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": [96] * 4,
              "layer_types": ["sliding_attention", "full_attention"] * 2,
              "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]}  # fmt: skip
    reference = save("gemma3n_text", tmp_path, **layers)
    assert_equals_transformers(load(tmp_path)[0], reference)
