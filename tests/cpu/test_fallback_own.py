"""The fallback for states in a form of a model's own: where they are found, how they are handed in and taken back.

That it is right is shown in `families/others_keeping.py`.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.files.source import resolve_model
from quire.layers.step import StateInputs
from quire.models.fallback import model as fallback
from quire.models.fallback.opaque_states import ALL_LAYERS, OpaqueRowStates, find_opaque_states
from quire.models.fallback.recurrent_states import StateSlots, StateTensor
from quire.models.loading.loader import build_model, load_model
from tests.cpu.families.harness import Family, save_checkpoint
from tests.cpu.families.more_types import small_config
from tests.cpu.families.others import draw_ln
from tests.cpu.paged_harness import assert_equals_transformers

CPU = torch.device("cpu")
BF16 = torch.bfloat16
TAKEN = ("input_ids", "memory", "use_cache")


class Remembers(nn.Module):
    """Sums of its tokens: of all, in what it returns, and of their squares, in a part of it."""

    def __init__(self, grows: bool = False, shares: bool = False) -> None:
        super().__init__()
        self.part = nn.Module()
        self.part.squares = None  # type: ignore[assignment]
        self.part.never = None  # type: ignore[assignment]
        self.grows, self.shares = grows, shares

    def forward(self, tokens: Tensor, memory: Any = None) -> dict[str, Any]:
        """tokens [rows, n]"""
        if memory is None:
            memory = SimpleNamespace(sums=[torch.full((5, len(tokens)), 100.0)], seen={"tokens": torch.zeros(1)})
            self.part.squares = torch.zeros(len(tokens), 3, dtype=BF16)  # type: ignore[assignment]
        memory.sums[0] = memory.sums[0] + tokens.sum(1)
        memory.seen["tokens"] += tokens.shape[1]
        self.part.squares = self.part.squares + (tokens**2).sum(1, keepdim=True).to(BF16)
        if self.shares:
            self.part.squares = self.part.squares.sum(0)
        hidden = tokens.float()
        return {"last_hidden_state": hidden, "memory": [memory, tokens] if self.grows else memory}


def find(body: Remembers) -> Any:
    return find_opaque_states(body, TAKEN, lambda num_rows, count: body(torch.ones(num_rows, count)), BF16)


def test_what_is_returned_and_what_is_left_is_found() -> None:
    body = Remembers()
    form, states = find(body)
    assert list(form.returned) == ["memory"] and form.attributes == (("part", "squares"),)
    assert form.row_dims == (1, None, 0), "a sum for each row, a count for all, squares for each row"
    assert list(states.values()) == [StateTensor((5,), torch.float32), StateTensor((3,), None)]
    assert body.part.squares is None, "nothing is left of a rehearsal"


def test_what_grows_or_is_of_no_row_is_not_taken_for_a_state() -> None:
    assert find(Remembers(grows=True)) is None
    assert find(Remembers(shares=True)) is None
    assert (
        find_opaque_states(nn.Linear(2, 2), TAKEN, lambda *unused: {"last_hidden_state": torch.ones(2, 3, 1)}, BF16)
        is None
    )


def test_states_go_to_their_rows_slots_and_come_back() -> None:
    body = Remembers()
    form, states = find(body)
    slots = StateSlots.of({ALL_LAYERS: states}, torch.float32, page_tokens=4)
    (spec,) = slots.specs
    caches = {spec.group: torch.full((1, 6, *spec.shape), torch.nan)}
    tokens = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    for start in (0, 2):
        body.part.squares = torch.full((7, 3), torch.nan)  # type: ignore[assignment]  # of a call that failed
        step: Any = SimpleNamespace(tokens=tokens, counts=[2, 2], len_bounds=[start + 2] * 2,
                                    groups={spec.group: StateInputs(torch.tensor([4, 1]))})  # fmt: skip
        rows = OpaqueRowStates(form, slots, step, caches)
        given = rows.body_arguments(body, {})
        assert given.pop("use_cache") and (start > 0) == (given["memory"] is not None)
        rows.collect_states(body, body(tokens, **given))
        rows.flush()
        assert body.part.squares is None
    assert caches[spec.group][0, 4].tolist() == [106] * 5 + [10] * 3, "begun once, by the model itself"
    assert caches[spec.group][0, 1].tolist() == [114] * 5 + [50] * 3
    assert caches[spec.group][0, [0, 2, 3, 5]].isnan().all()


@pytest.mark.parametrize(("kind", "apart", "continues_states"), [
    ("rwkv", True, True), ("xlstm", False, True), ("recurrent_gemma", False, False),
])  # fmt: skip
def test_models_with_states_of_their_own_are_right(
    kind: str, apart: bool, continues_states: bool, tmp_path: Path
) -> None:
    config = small_config(kind)
    reference = save_checkpoint(Family(kind, lambda: config, draw_ln), tmp_path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loaded = load_model(resolve_model(str(tmp_path)), dtype="float32", device=CPU, max_model_len=None,
                            page_tokens=4)  # fmt: skip
    model: Any = loaded.model
    assert (model.separate_rows, model.continues_states, model.is_eager_only()) == (apart, continues_states, True)
    assert any(fallback.NO_BATCHES in str(each.message) for each in said) == apart
    assert_equals_transformers(model, reference)


def test_no_more_rows_are_at_hand_than_memory_was_set_aside_for(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config("xlstm").to_dict()
    made: dict[bool, Any] = {}
    for few in (False, True):
        monkeypatch.setattr(fallback, "CALL_BYTES", 1 if few else 2**28)
        made[few] = build_model(config, dtype="float32", device=CPU, page_tokens=4)[0]
    assert made[True]._call_rows == 1 and made[False]._call_rows > 9
    assert made[True].work_bytes(9) == made[True].work_bytes(1) < made[False].work_bytes(9)
