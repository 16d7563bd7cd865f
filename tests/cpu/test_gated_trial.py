"""Which product a model's gates and ups get: Hopper's own if it is right and quicker there, else cuBLAS with a SiLU-mul
behind it. No GPU is needed to decide that."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.activations import Curve
from quire.kernels.table import REFERENCE, FirstWinner, Ops
from quire.kernels.validation import gated_trial as trial_gated
from quire.kernels.validation.gated_trial import GatedTrialShape, is_quicker, settle_gated, try_gated
from quire.layers.build import Build
from quire.layers.mlp import GatedMLP
from quire.layers.quant import Fp8
from quire.models.loading.kernel_trials import Trials
from quire.types import QuireError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SHAPE = GatedTrialShape(4096, 24576, torch.bfloat16)
SMALL = GatedTrialShape(16, 12, torch.float32)
TABLE = replace(REFERENCE, captures=True)


class Plain:
    """A `FusedLinear` for rows from `first` to `last`; `factor`: how wrong."""

    def __init__(self, first: int = 0, last: int = 1 << 20, factor: float = 1.0):
        self.first, self.last, self.factor = first, last, factor

    def wins(self, num_rows: int, weight: Tensor, gate: Curve | None) -> bool:
        return self.first <= num_rows <= self.last

    def run(self, x: Tensor, weight: Tensor, bias: Any, norm: Any, eps: float, gate: Curve | None,
            residual: Any) -> Tensor:  # fmt: skip
        x = x if norm is None else REFERENCE.rms_norm(x, norm, eps)
        return REFERENCE.gate_mul(x @ weight.t(), gate) * self.factor


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A Hopper card with Triton 3.6; returns a way to say what the trial and the timing find there."""
    import triton

    def say(attempt: Callable[..., None] = lambda *args: None, quicker: bool = True) -> None:
        monkeypatch.setattr(trial_gated, "try_gated", attempt)
        monkeypatch.setattr(trial_gated, "is_quicker", lambda *args: quicker)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    say()
    return say


def settled(shape: GatedTrialShape = SHAPE, ops: Ops = TABLE) -> bool:
    """Whether it was taken, without a word."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = settle_gated(ops, shape, CUDA, strict=True)
    assert found is ops or found == replace(ops, fused_linear=found.fused_linear)
    return found is not ops


def test_it_is_taken_where_it_is_right_and_quicker(hopper: Any) -> None:
    assert settled() and settled(replace(SHAPE, in_features=320, num_outputs=256, dtype=torch.float16))
    hopper(quicker=False)
    assert not settled()


@pytest.mark.parametrize("change", [{"in_features": 4128}, {"in_features": 256}, {"num_outputs": 24576 + 128},
                                    {"dtype": torch.float32}])  # fmt: skip
def test_other_shapes_are_left_alone(hopper: Any, change: dict[str, Any]) -> None:
    hopper(lambda *args: pytest.fail("nothing is tried"))
    assert not settled(replace(SHAPE, **change))


def test_other_cards_and_tables_are_left_alone(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hopper(lambda *args: pytest.fail("nothing is tried"))
    assert not settled(ops=REFERENCE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert not settled()


def test_a_kernel_that_fails_gives_way_in_one_line(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(*args: Any) -> None:
        raise RuntimeError("PassManager::run failed\nand a page of text")

    hopper(attempt)
    monkeypatch.setattr(trial_gated, "is_quicker", lambda *args: pytest.fail("nothing is timed"))
    with pytest.warns(UserWarning, match=r"gate and up .*PassManager::run failed") as said:
        assert settle_gated(TABLE, SHAPE, CUDA, strict=False) is TABLE
    assert len(said) == 1 and "\n" not in str(said[0].message)
    with pytest.raises(QuireError, match="gate and up") as refused:
        settle_gated(TABLE, SHAPE, CUDA, strict=True)
    assert refused.value.code == "kernel_failed"


def test_an_unknown_triton_is_not_tried(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton, "__version__", "3.8.0")
    hopper(lambda *args: pytest.fail("it might never come back"))
    with pytest.warns(UserWarning, match=r"made for Triton 3\.6 and 3\.7, this is 3\.8\.0"):
        assert settle_gated(TABLE, SHAPE, CUDA, strict=False) is TABLE
    with pytest.raises(QuireError, match=r"made for Triton 3\.6 and 3\.7, this is 3\.8\.0"):
        settle_gated(TABLE, SHAPE, CUDA, strict=True)


def test_the_trial_sees_what_is_wrong() -> None:
    try_gated(replace(TABLE, fused_linear=Plain()), SMALL, CPU)
    with pytest.raises(ArithmeticError):
        try_gated(replace(TABLE, fused_linear=Plain(factor=1.1)), SMALL, CPU)
    with pytest.raises(RuntimeError, match="not used"):
        try_gated(replace(TABLE, fused_linear=Plain(last=16)), SMALL, CPU)


def test_it_has_to_be_quicker_by_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_gated, "WARM_SECONDS", 0.0)
    monkeypatch.setattr(trial_gated, "TIMED_ROWS", 8)
    ops = replace(TABLE, fused_linear=Plain())
    for times, taken in (([1.0, 1.0, 0.9, 1.1], True), ([0.995, 1.0, 1.0, 1.1], False), ([2.0, 1.0, 2.0, 1.0], False)):
        turns = iter(times)  # ours, plain, ours, plain
        assert is_quicker(ops, SMALL, CPU, lambda launch: (launch(), next(turns))[1]) is taken  # noqa: B023
    monkeypatch.setattr(trial_gated, "_race", lambda *args: (_ for _ in ()).throw(torch.OutOfMemoryError()))
    assert not is_quicker(ops, SMALL, CPU)


def test_the_row_takes_many_rows_of_its_own_shape_only() -> None:
    from quire.kernels.triton.linear.gated_hopper import GatedLinear

    row = GatedLinear((512, 320), "silu", REFERENCE.rms_norm, REFERENCE.gate_mul)
    weight = torch.zeros(512, 320, dtype=torch.bfloat16)
    assert row.wins(1024, weight, "silu") and row.wins(8191, weight, "silu")
    assert (
        not row.wins(1023, weight, "silu")
        and not row.wins(1024, weight, None)
        and not row.wins(1024, weight, "gelu_tanh")
    )
    assert not row.wins(1024, torch.zeros(256, 320), "silu")
    assert not row.wins(1024, torch.zeros(320, 512).t(), "silu")
    assert not row.wins(1024, torch.zeros(512 * 320 + 1, dtype=torch.bfloat16)[1:].view(512, 320), "silu")
    x, bias = torch.randn(4, 320), torch.randn(512)
    expected = REFERENCE.gate_mul(x @ weight.float().t() + bias)
    assert torch.equal(row.run(x, weight.float(), bias, None, 0.0, "silu", None), expected), (
        "a bias takes the plain path"
    )


def test_the_largest_plain_product_of_a_model_is_tried() -> None:
    def block(inner_width: int, scheme: Any = None, bias: bool = False, activation: str = "silu") -> GatedMLP:
        return GatedMLP("mlp", None, 64, inner_width, bias=bias, build=Build.plain(torch.bfloat16, TABLE, scheme),
                        activation=activation)  # fmt: skip

    def gate_up(*blocks: GatedMLP) -> GatedTrialShape | None:
        return Trials(torch.nn.ModuleList(blocks), torch.bfloat16, CUDA, 64).largest_gate_up()

    others = [block(256, bias=True), block(256, scheme=Fp8(TABLE))]
    assert gate_up(*others) is None
    named = GatedTrialShape(64, 256, torch.bfloat16, "gelu_tanh")
    assert gate_up(block(128, activation="gelu_pytorch_tanh"), *others) == named
    assert gate_up(block(96), block(128), block(96), *others) == GatedTrialShape(64, 256, torch.bfloat16)


def test_the_first_that_wins_does_the_work() -> None:
    both = FirstWinner(Plain(first=8, factor=2.0), Plain(last=4, factor=3.0))
    weight = torch.randn(6, 5)
    assert both.wins(1, weight, "silu") and both.wins(8, weight, "silu") and not both.wins(6, weight, "silu")
    for num_rows, factor in ((9, 2.0), (2, 3.0)):
        x = torch.randn(num_rows, 5)
        assert torch.equal(
            both.run(x, weight, None, None, 0.0, "silu", None), REFERENCE.gate_mul(x @ weight.t()) * factor
        )
