"""INT8 weights times INT8 activations in the native library, against whole numbers in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from quire.files.source import resolve_model
from quire.kernels.native.library import ISAS, Native
from quire.kernels.native.matrix import PackedLinear, matrix_bytes, pack_floats
from quire.layers.experts import Experts
from quire.layers.weights import weights_bytes
from quire.models.loading.loader import build_model, load_model, read_config
from quire.quantize.recipe import find_target
from quire.quantize.run import QuantOptions, Run
from quire.runtime.reading import CPU, PAGE, read_stretch
from tests.cpu.native_isas import open_or_skip

BLOCK = 32


@pytest.fixture(scope="module", params=ISAS)
def native(request: pytest.FixtureRequest) -> Native:
    return open_or_skip(request.param)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Returns whole numbers and scales of each group of columns, [rows, groups, ...]."""
    groups = x.unflatten(1, (-1, group))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, groups * (1 / scale), torch.zeros(())).round().double(), scale.double()


def reference(x: Tensor, w: Tensor) -> Tensor:
    weights, of_rows = rounded(w, w.shape[1])
    numbers, scales = rounded(x, BLOCK)
    blocks = torch.einsum("tbi,rbi->trb", numbers, weights.flatten(1).unflatten(1, (-1, BLOCK)))
    return (blocks * scales.squeeze(-1).unsqueeze(1)).sum(-1) * of_rows.view(1, -1)


def pack(native: Native, w: Tensor) -> Any:
    return pack_floats(native, "W8A8", *w.shape, lambda first, count: w[first : first + count])


@pytest.mark.parametrize("rows, columns, tokens", [(1, 32, 1), (37, 96, 5), (130, 576, 19), (64, 2048, 33)])
def test_products_are_those_of_whole_numbers(native: Native, rows: int, columns: int, tokens: int) -> None:
    w, x = draw(rows, columns, seed=1) * 0.05, draw(tokens, columns, seed=2)
    x = x * torch.logspace(-3, 3, tokens).view(-1, 1)
    w[rows // 2], x[tokens // 2] = 0, 0
    got, want = PackedLinear([pack(native, w)])(x), reference(x, w)
    size = want.abs().amax(1, keepdim=True).clamp_min(1e-30)
    # A value halfway between two numbers may become either, by the last bit of its scale's inverse.
    assert ((got - want).abs() / size).max() < 2e-3 and ((got - want).abs() / size).mean() < 2e-5
    alone = torch.cat([PackedLinear([pack(native, w)])(x[i : i + 1]) for i in range(tokens)])
    assert torch.equal(alone, got), "a token has the same bits alone and in company"


def test_rows_are_the_rounded_weights(native: Native) -> None:
    w = draw(45, 160, seed=3)
    packed = pack(native, w)
    numbers, scales = rounded(w, 160)
    torch.testing.assert_close(packed.rows(torch.arange(45)), (numbers * scales).flatten(1).float(), rtol=0, atol=2e-2)
    assert matrix_bytes(native, "W8A8", 64, 160) == 64 * (160 + 4)


def test_what_is_not_finite_stays_with_its_token(native: Native) -> None:
    w, x = draw(40, 64, seed=4), draw(4, 64, seed=5)
    clean = PackedLinear([pack(native, w)])(x)
    x[1, 7], x[3, 40] = float("nan"), float("inf")
    got = PackedLinear([pack(native, w)])(x)
    assert torch.isnan(got[[1, 3]]).all() and torch.equal(got[[0, 2]], clean[[0, 2]])


def test_matrices_of_other_types_have_their_own_inputs(native: Native) -> None:
    """Merged matrices may have kept another type."""
    w, x = draw(48, 64, seed=6), draw(9, 64, seed=7)
    other = pack_floats(native, "Q8_0", 48, 64, lambda first, count: w[first : first + count])
    whole = pack_floats(native, "F32", 48, 64, lambda first, count: w[first : first + count])
    parts = [pack(native, w), other, whole]
    merged = PackedLinear(parts)(x)
    assert torch.equal(merged, torch.cat([PackedLinear([part])(x) for part in parts], 1))


# ---------------------------------------------------------------------------------------------------------------------
# Models

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
TOKENS = list(range(3, 60))


def make(folder: Path, config: Any) -> Path:
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def load(folder: Path, **how: Any) -> Any:
    files = resolve_model(str(folder))
    return load_model(files, **{"dtype": "auto", **how}, device=CPU, max_model_len=None, page_tokens=PAGE).model


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model.logits(read_stretch(model, TOKENS)).float()
    return found


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_a_model_quantized_while_loading(kind: str, tmp_path: Path) -> None:
    config = (
        transformers.LlamaConfig(**TINY)
        if kind == "dense"
        else transformers.Qwen3MoeConfig(
            **TINY, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
        )
    )
    folder = make(tmp_path / "model", config)
    exact, eight = load(folder, dtype="float32", kernels="torch"), load(folder, quant="int8")
    off = (logits(eight) - logits(exact)).abs().max() / logits(exact).abs().max()
    assert 0 < off < 0.05
    files = read_config(resolve_model(str(folder)))
    how: dict[str, Any] = {"dtype": "auto", "device": CPU, "page_tokens": PAGE}
    blank = [build_model(files, quant=quant, **how)[0] for quant in ("int8", "none")]
    sizes = [weights_bytes(model) for model in blank]
    assert sizes[0] < 0.4 * sizes[1], "of float32"


def test_a_published_w8a8_checkpoint_keeps_its_bytes(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", transformers.LlamaConfig(**TINY))
    Run(resolve_model(str(folder))).quantize(QuantOptions(find_target("INT8"), tmp_path / "int8"))
    eight = load(tmp_path / "int8")
    matrices = eight.layers[0].mlp.down.weight
    assert [matrix.form for matrix in matrices] == ["W8A8"]
    decoded = load(tmp_path / "int8", dtype="float32", kernels="torch")
    down = decoded.layers[0].mlp.down.weight
    torch.testing.assert_close(matrices[0].rows(torch.arange(len(down))), down.data, rtol=1e-6, atol=1e-8)
    off = (logits(eight) - logits(decoded)).abs().max() / logits(decoded).abs().max()
    assert 0 < off < 0.03, "activations are rounded, weights are not rounded again"
    # Where the file asks for no rounding of activations, blocks with 16-bit activations hold the same numbers.
    config = json.loads((tmp_path / "int8/config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = None
    (tmp_path / "int8/config.json").write_text(json.dumps(config))
    assert [matrix.form for matrix in load(tmp_path / "int8").layers[0].mlp.down.weight] == ["Q8_0"]


def test_experts_have_the_bits_of_company(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        **TINY, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    )
    model = load(make(tmp_path / "model", config), quant="int8")
    assert any(isinstance(module, Experts) for module in model.modules())
    whole = read_stretch(model, TOKENS)
    assert torch.equal(read_stretch(model, TOKENS[:20]), whole[:20])
