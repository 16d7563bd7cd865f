"""`Build`: a scheme for each tensor by name, and what is derived from it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.kernels.table import REFERENCE
from quire.layers.build import Build
from quire.layers.linear import Linear
from quire.layers.quant import Dense, Fp16Packed
from quire.layers.quant.schemes import Schemes
from quire.models.families.moe import MoEModel
from quire.models.model import Model
from quire.types import QuireError

FIELDS: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts": 4,
    "num_experts_per_tok": 2, "head_dim": 8, "mlp_only_layers": [0],
}  # fmt: skip


def build_with(*exceptions: tuple[str, Any]) -> MoEModel:
    plain = Build.plain(torch.float32, REFERENCE)
    schemes = Schemes(plain.schemes.usual, exceptions)
    build = Build(torch.float32, torch.float32, torch.device("cpu"), 4, REFERENCE, schemes)
    return MoEModel(MoEModel.read_config(FIELDS), build=build)


def test_every_tensor_has_the_scheme_of_its_name() -> None:
    packed, kept = Fp16Packed(REFERENCE), Dense(REFERENCE)
    model: Any = build_with((r"model\.layers\.0\..*", packed), (r".*\.o_proj\.weight", kept), (r"lm_head.*", packed))
    first, second = model.layers
    for linear in (first.attention.qkv, first.attention.out, first.mlp.gate_up, first.mlp.down, model.head.linear):
        assert linear.scheme is packed
        assert linear.weight.stored == torch.float16
    assert second.attention.out.scheme is kept
    usual = second.attention.qkv.scheme
    assert isinstance(usual, Dense) and usual is not kept
    assert second.mlp.experts.scheme is usual
    assert sum(isinstance(module, Linear) for module in model.modules()) == 7


@pytest.mark.parametrize("pattern", [r".*\.k_proj\.weight", r".*\.experts\.2\.down_proj\.weight"])
def test_merged_tensors_can_not_differ(pattern: str) -> None:
    with pytest.raises(QuireError, match=r"q_proj.*k_proj.*one weight|experts\.0.*experts\.2.*one weight") as error:
        build_with((pattern, Fp16Packed(REFERENCE)))
    assert "\n" not in str(error.value)


def test_a_derived_build_leaves_its_origin_alone() -> None:
    build = Build.plain(torch.float32, REFERENCE)
    other = build.with_scheme(Fp16Packed(REFERENCE))
    assert isinstance(other.schemes.of("x.weight"), Fp16Packed) and isinstance(build.schemes.of("x.weight"), Dense)
    assert build.communicator.size == 1 and build.communicator.rank == 0
    x = torch.randn(2, 3)
    assert build.communicator.all_reduce(x) is x


def test_no_caller_asks_whether_a_model_has_an_ability() -> None:
    """Optional abilities are methods with defaults on the protocol, so a probe by name would hide a renamed one."""
    abilities = {name for name in [*vars(Model), *Model.__annotations__] if not name.startswith("_")}
    assert {"is_eager_only", "start_notes", "ops"} <= abilities
    probes = []
    for path in sorted((Path(__file__).parents[2] / "quire").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("getattr", "hasattr")
            ):
                asked, name = node.args[0], node.args[1]
                is_model = ast.unparse(asked).rpartition(".")[2] == "model"
                is_ability = isinstance(name, ast.Constant) and name.value in abilities - {"vocab_size", "specs"}
                if is_model or is_ability:
                    probes.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert not probes
