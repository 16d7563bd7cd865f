"""Weights quantized while loading, GGUF types without kernels of their own, and where neither can be had."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig

from quire.bench.quality import bench_quality
from quire.config import Config
from quire.config_build import override_config
from quire.files.source import resolve_model
from quire.kernels.native.library import ISAS
from quire.models.loading.loader import LoadedModel, load_model
from quire.startup.cache_plan import memory_report
from quire.types import QuireError
from tests.cpu.families.harness import TINY, Family, save_checkpoint
from tests.cpu.native_isas import open_or_skip
from tests.cpu.paged_harness import HarnessRow, PagedHarness
from tests.cpu.tiny_gguf import write_gguf
from tests.cpu.tiny_models import make_tiny

CPU = torch.device("cpu")


def load(place: Path, **options: Any) -> LoadedModel:
    given = {"dtype": "auto", "device": CPU, "max_model_len": None, "page_tokens": 16, **options}
    return load_model(resolve_model(str(place)), **given)


def logits(model: Any) -> torch.Tensor:
    row = HarnessRow([(7 * i) % 200 + 3 for i in range(40)])
    harness = PagedHarness(model, num_pages=8, seed=0)
    return torch.cat([harness.step([(row, count)]) for count in (33, 1, 1, 5)])


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def forms(model: Any) -> set[str]:
    layer = model.layers[0]
    linears = (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
    return {matrix.form for linear in linears for matrix in linear.weight}


@pytest.fixture(autouse=True)
def _needs_the_library() -> None:
    open_or_skip("portable")


@pytest.mark.parametrize(("quant", "bound", "share"), [("q8_0", 0.06, 0.30), ("q4_0", 0.6, 0.26)])
def test_quantizing_at_load(quant: str, bound: float, share: float, tmp_path: Path) -> None:
    """A safetensors folder: smaller by what the form promises, and close to what it was."""
    _, folder = make_tiny("qwen2", tmp_path)
    loaded, exact = load(folder, quant=quant), load(folder, kernels="torch")
    assert forms(loaded.model) == {quant.upper()}
    model: Any = loaded.model
    assert model.embedding.weight[0].form == model.head.linear.weight[0].form == "Q8_0"
    assert loaded.weights_bytes < share * exact.weights_bytes
    assert 0 < error(logits(loaded.model), logits(exact.model)) < bound


@pytest.mark.parametrize("form", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"])
@pytest.mark.parametrize("isa", ISAS)
def test_gguf_blocks_are_kept(form: str, isa: str, tmp_path: Path) -> None:
    """Only activations are rounded: against the same blocks decoded to float32, next to nothing is lost."""
    open_or_skip(isa)
    reference, _ = make_tiny("smollm2", tmp_path)
    write_gguf(reference, "llama", tmp_path / "m.gguf", types={r"blk.*(attn|ffn)_\w+\.weight|token_embd.weight": form,
                                                              r".*norm\.weight": "F32"})  # fmt: skip
    kept, exact = load(tmp_path / "m.gguf", kernels=isa), load(tmp_path / "m.gguf", kernels="torch")
    assert forms(kept.model) == {form}
    assert kept.weights_bytes < 0.6 * exact.weights_bytes
    assert error(logits(kept.model), logits(exact.model)) < 0.02


def test_a_type_without_kernels_falls_back_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference, _ = make_tiny("llama", tmp_path, hidden_size=256, intermediate_size=256)
    types = {r"blk.*attn_[qkv]\.weight": "TQ1_0", r"blk.*ffn_down.weight": "TQ2_0", r"blk.*ffn_up\.weight": "Q4_0"}
    write_gguf(reference, "llama", tmp_path / "m.gguf", types=types)
    with caplog.at_level(logging.WARNING, "quire"):
        kept = load(tmp_path / "m.gguf")
    lines = sorted(record.getMessage() for record in caplog.records)
    assert [line.partition(":")[0] for line in lines] == [f"No CPU kernel reads {kind}" for kind in ("TQ1_0", "TQ2_0")]
    assert forms(kept.model) == {"Q8_0", "Q4_0", "F32"}
    assert error(logits(kept.model), logits(load(tmp_path / "m.gguf", kernels="torch").model)) < 0.03


def test_experts_of_a_gguf_keep_their_blocks(tmp_path: Path) -> None:
    """All experts of a kind are one tensor there; each becomes a matrix of its own, of the same blocks."""
    fields = {**TINY, "num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16}
    config = Qwen3MoeConfig(**fields, norm_topk_prob=True)
    reference = save_checkpoint(Family("", lambda: config), tmp_path)
    counts = {"qwen3moe.expert_count": 4, "qwen3moe.expert_used_count": 2, "qwen3moe.expert_feed_forward_length": 32}
    types = {r"blk.*ffn_(gate|up)_exps.weight": "Q4_0", r"blk.*ffn_down_exps.weight": "Q8_0"}
    write_gguf(reference, "qwen3moe", tmp_path / "m.gguf", types=types, metadata=counts)
    kept: Any = load(tmp_path / "m.gguf").model
    experts = kept.layers[0].mlp.experts
    assert [matrix.form for matrix in experts.gate_up] == ["Q4_0"] * 8
    assert [matrix.form for matrix in experts.down] == ["Q8_0"] * 4
    assert error(logits(kept), logits(load(tmp_path / "m.gguf", kernels="torch").model)) < 0.03


def test_columns_that_make_no_blocks_stay_floats_and_a_note_says_so(tmp_path: Path) -> None:
    _, folder = make_tiny("llama", tmp_path, intermediate_size=72)
    with pytest.warns(UserWarning, match="stay float32") as caught:
        loaded = load(folder, quant="q8_0")
    num_layers = len(loaded.model.layers)  # type: ignore[attr-defined]
    notes = [str(warning.message) for warning in caught]
    assert len(notes) == 1 and "\n" not in notes[0]
    # Of each layer one matrix of seven reads the feed-forward block's width; embedding and head are two more.
    assert notes[0].startswith(
        f"{num_layers} of {7 * num_layers + 2} matrices stay float32 with quant=q8_0, since they"
    )
    assert "rows of 72 elements, not a multiple of 32: model.layers.0.mlp.down_proj.weight" in notes[0]
    assert forms(loaded.model) == {"Q8_0", "F32"}
    assert error(logits(loaded.model), logits(load(folder, kernels="torch").model)) < 0.03


def test_the_doctor_says_what_stays_floats(tmp_path: Path) -> None:
    _, folder = make_tiny("llama", tmp_path, intermediate_size=72)
    lines = memory_report(override_config(Config(), {"model": str(folder), "quant": "q4_0", "device": "cpu"})).lines()
    assert sum("stay float32 with quant=q4_0" in line for line in lines) == 1
    lines = memory_report(override_config(Config(), {"model": str(folder), "device": "cpu"})).lines()
    assert not any("stay float32" in line for line in lines)


def test_with_float16_they_are_float16(tmp_path: Path) -> None:
    _, folder = make_tiny("llama", tmp_path, intermediate_size=72)
    with pytest.warns(UserWarning, match="stay float16"):
        loaded = load(folder, quant="q8_0", dtype="float16")
    assert forms(loaded.model) == {"Q8_0", "F16"}
    with pytest.warns(UserWarning, match="stay float32"):
        assert loaded.weights_bytes < load(folder, quant="q8_0").weights_bytes
    assert error(logits(loaded.model), logits(load(folder, kernels="torch").model)) < 0.03


def test_nothing_is_said_where_everything_fits(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    _, folder = make_tiny("llama", tmp_path)
    load(folder, quant="q8_0")
    assert not [warning for warning in recwarn if "stay float" in str(warning.message)]


def test_a_model_of_which_nothing_would_be_quantized_is_refused(tmp_path: Path) -> None:
    _, folder = make_tiny("llama", tmp_path, hidden_size=72, num_attention_heads=4, intermediate_size=100, head_dim=18)
    for build in (
        lambda: load(folder, quant="q8_0"),
        lambda: memory_report(override_config(Config(), {"model": str(folder), "quant": "q8_0", "device": "cpu"})),
    ):
        with pytest.raises(QuireError, match="quant=q8_0 would change nothing") as caught:
            build()
        assert caught.value.code == "invalid_parameter" and caught.value.param == "quant"
        assert "rows of 72, 100 elements, not a multiple of 32" in caught.value.what


def test_quant_without_the_kernels_is_an_error(tmp_path: Path) -> None:
    _, folder = make_tiny("llama", tmp_path)
    with pytest.raises(QuireError, match="quant=q4_0 needs a CPU, the native kernels") as caught:
        load(folder, quant="q4_0", kernels="torch")
    assert caught.value.param == "quant"


def test_a_wrong_quant_names_the_choices() -> None:
    with pytest.raises(QuireError, match="q8_0") as caught:
        override_config(Config(), {"quant": "q5"})
    assert "q4_0" in str(caught.value) and "fp8" in str(caught.value)


def test_quality_finds_nothing_where_nothing_is_lost(tmp_path: Path) -> None:
    """On the built-in model's tokenizer a made-up text; float16 weights against float32 ones."""
    try:
        resolve_model("smollm2", offline=True)
    except QuireError as problem:
        pytest.skip(str(problem))
    config = override_config(Config(), {"dtype": "float32", "offline": True})
    report = bench_quality(config, "The quick brown fox jumps over the lazy dog. " * 20, stretches=1, length=48)
    assert report["tokens"] == 47 and report["same_top"] == 1.0 and abs(report["kl"]) < 1e-6
    assert report["perplexity"] == pytest.approx(report["float32_perplexity"])
    with pytest.raises(QuireError, match="fewer than the 2048 needed"):
        bench_quality(config, "Too short.", stretches=2)
