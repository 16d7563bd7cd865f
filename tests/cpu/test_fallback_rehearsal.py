"""Dry runs of transformers models before they have weights: synthetic values, and what the dry run records.

`families/others.py` and `families/others_keeping.py` show that the results are right.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from quire.models.fallback import dry_run as fallback_rehearse
from quire.models.fallback.build import import_transformers
from quire.models.fallback.dry_run import _check_all_keep, find_cache_layout, measure_call
from quire.models.fallback.synthetic_values import SyntheticValues
from quire.types import QuireError
from tests.cpu.families.more_types import small_config


class LooksAtNumbers(nn.Module):
    """Experts taken one by one, each with the tokens it was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.Parameter(torch.empty(4, 6, 8))

    def forward(self, x: Tensor) -> Tensor:
        """[n, 8] -> [n, 6]"""
        expert = self.router(x).argmax(-1)
        counts = expert.bincount(minlength=4).tolist()
        parts = x[expert.argsort()].split(counts)
        out = torch.cat([part @ self.experts[i].T for i, part in enumerate(parts)])
        out[(expert == 0).nonzero()[:, 0]] += self.experts[0, :, 0]
        return out


def test_numbers_are_made_up_where_weights_are_none() -> None:
    with torch.device("meta"):
        module = LooksAtNumbers()
    x = torch.randn(5, 8)
    with pytest.raises((RuntimeError, NotImplementedError)):
        module(x.to("meta"))
    with torch.no_grad(), SyntheticValues():
        out = module(x)
        moved = module.experts.to("cpu")
        both = torch.ones(3).add_(torch.ones(3, device="meta"))
    assert out.shape == (5, 6) and not out.is_meta and bool(out.isfinite().all())
    assert not moved.is_meta and module.experts.is_meta
    assert both.tolist() == [1, 1, 1], "numbers that are there stay"


def test_without_weights_numbers_are_what_they_are() -> None:
    with SyntheticValues():
        assert torch.equal(torch.arange(6).view(2, 3) @ torch.ones(3, 1, dtype=torch.long), torch.tensor([[3], [12]]))


@pytest.mark.parametrize("kind", ["dbrx", "jetmoe", "longcat_flash"])
def test_experts_that_look_at_numbers_can_be_rehearsed(kind: str) -> None:
    import_transformers(kind)
    kept = find_cache_layout(small_config(kind))
    assert sorted(kept.shapes) == [0, 1] and not kept.gathers


def test_a_call_that_looks_at_numbers_is_measured() -> None:
    import_transformers("jetmoe")
    config = small_config("jetmoe")
    _, num_bytes = measure_call(config, find_cache_layout(config), torch.float32, 512)
    assert num_bytes >= 256 * 2 * 96 * 4, "what lies between an expert's matrices, of all tokens"


def test_weights_are_no_part_of_what_a_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts behind each other are looked at one by one, or from the other side: neither makes a tensor."""
    import_transformers("dots3_note_text")
    config = small_config("dots3_note_text")
    config.n_routed_experts = 2048
    _, num_bytes = measure_call(config, find_cache_layout(config), torch.float32, 16)
    assert num_bytes < 2048 * 24 * 64 * 4, "all experts' smaller matrices"
    monkeypatch.setattr(fallback_rehearse, "MAX_OPERATIONS", 10)
    assert measure_call(config, find_cache_layout(config), torch.float32, 1)[1] < num_bytes, "of what was seen so far"


def test_layers_may_have_heads_of_their_own() -> None:
    config = small_config("dots3_note_text")
    with pytest.raises(RuntimeError):
        assert config.num_attention_heads
    assert fallback_rehearse._max_heads(config) == 4


def test_who_attends_twice_in_a_layer_attends_by_itself() -> None:
    """Pages would hold the values of the second time."""
    import_transformers("diffllama")
    kept = find_cache_layout(small_config("diffllama"))
    assert kept.gathers and kept.shapes[0].v_dim == 16


def test_layers_of_which_nothing_was_seen_are_not_trusted() -> None:
    model = SimpleNamespace(config=SimpleNamespace(model_type="odd", num_hidden_layers=3, layer_types=None))
    _check_all_keep(model, {0, 2}, {1})
    with pytest.raises(QuireError, match=r"odd can't run .* 2 of its 3 layers .* others may keep one"):
        _check_all_keep(model, {0}, {1})
