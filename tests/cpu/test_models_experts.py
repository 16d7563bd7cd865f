"""Mixtures and latents beyond what the harness proves: forms, layouts of checkpoints, bad configs, memory on paper."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma4TextConfig,
    GptOssConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from quire.config import Config
from quire.config_build import override_config
from quire.kernels import table
from quire.kernels.expert_types import Routing, plain_matrix, quantize_matrix
from quire.kernels.formats.packed_ints import dequantize_mxfp4
from quire.kernels.reference.experts import route, run_experts
from quire.kernels.table import REFERENCE
from quire.layers.build import Build
from quire.layers.experts import ExpertNames, MoEShape
from quire.layers.moe import MoE
from quire.layers.norm import RMSNorm
from quire.layers.weights import iter_weights, put_weight
from quire.models.families.deepseek import DeepSeekConfig, DeepSeekModel
from quire.models.loading import loader
from quire.models.loading.loader import build_model
from quire.startup.cache_plan import memory_report
from quire.types import QuireError
from tests.cpu.families.experts import GROUPS, LATENT, QWEN, STRETCHED, YARN, draw_sharp
from tests.cpu.families.fp8_in_torch import Fp8InTorch
from tests.cpu.families.gemma import GEMMA4, GEMMA4_EXPERTS, SIX_LAYERS, draw_routed
from tests.cpu.families.harness import TINY, Family, all_families, save_checkpoint
from tests.cpu.paged_harness import HarnessRow, PagedHarness
from tests.cpu.rig import load, make_engine
from tests.cpu.tiny_gguf import write_gguf

TOKENS = [(7 * i * i + 3) % 256 for i in range(50)]


def logits_of(model: Any) -> Tensor:
    """All positions of one row, in pieces, over scattered pages."""
    row = HarnessRow(list(TOKENS))
    harness = PagedHarness(model, num_pages=40, seed=2)
    return torch.cat([harness.step([(row, count)]) for count in (20, 1, 1, 7, 21)])


def assert_equal(folder: Path, reference: Any) -> None:
    with torch.inference_mode():
        want = reference(torch.tensor([TOKENS])).logits[0]
    assert (logits_of(load(folder)) - want).abs().max() <= 1e-4 * want.abs().max()


def qwen3_moe(folder: Path, **fields: Any) -> Any:
    config = Qwen3MoeConfig(**{**TINY, **QWEN, "head_dim": 16, "norm_topk_prob": True, **fields})
    return save_checkpoint(Family("qwen3_moe", lambda: config, draw_sharp), folder)


def gemma4(**fields: Any) -> Gemma4TextConfig:
    return Gemma4TextConfig(**{**SIX_LAYERS, **GEMMA4, **GEMMA4_EXPERTS, "vocab_size_per_layer_input": 256, **fields})


# ---------------------------------------------------------------------------------------------------------------------
# Latent attention

VARIANTS = {
    "v2 greedy, queries through a rank": DeepseekV2Config(**LATENT, **GROUPS, q_lora_rank=28, topk_method="greedy"),
    "v3 yarn, halves": DeepseekV3Config(
        **LATENT, **GROUPS, q_lora_rank=None, rope_interleave=False, rope_parameters=YARN
    ),
    "v3 biases": DeepseekV3Config(**LATENT, **GROUPS, q_lora_rank=28, attention_bias=True),
}


@pytest.mark.parametrize("form", ["absorbed", "expanded", "naive"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_three_forms_are_one(variant: str, form: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = save_checkpoint(Family("deepseek", lambda: VARIANTS[variant], draw_sharp), tmp_path)
    read = DeepSeekConfig.from_hf
    monkeypatch.setattr(DeepSeekModel, "read_config", staticmethod(lambda config: replace(read(config), form=form)))
    assert_equal(tmp_path, reference)
    spec = load(tmp_path).specs[0]
    assert (spec.planes, spec.shape) == ((2, (4, 40)) if form == "naive" else (1, (1, 48)))


def test_layers_for_drafting_are_left_out(tmp_path: Path) -> None:
    config = DeepseekV3Config(**LATENT, **GROUPS, q_lora_rank=28)
    reference = save_checkpoint(Family("deepseek_v3", lambda: config, draw_sharp), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "model.layers.2.eh_proj.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    assert_equal(tmp_path, reference)
    save_file({**tensors, "model.layers.3.eh_proj.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(QuireError, match=r"model\.layers\.3\.eh_proj\.weight, which this model does not have"):
        load(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# The layer itself


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("is_normed", [False, True])
def test_a_shared_expert_leaves_alone_what_the_others_read(is_normed: bool, is_gated: bool) -> None:
    """Its sum takes the stream's memory; without a norm the routed experts read that very stream."""
    shape = MoEShape(16, 8, Routing(4, 2), shared_width=8, shared_gated=is_gated)
    build = Build.plain(torch.float32, REFERENCE)
    norm = RMSNorm("norm", 16, 1e-6, build) if is_normed else None
    moe: Any = MoE(
        ExpertNames("mlp"), norm, shape, build=build
    )  # fmt: skip
    torch.manual_seed(1)
    for module, name, weight in list(iter_weights(moe)):
        put_weight(module, name, torch.randn(weight.shape))
    stream = torch.randn(5, 16)
    x = stream if norm is None else norm(stream)
    shared = moe.shared(x.clone(), torch.zeros_like(stream))
    chosen, shares = route(x @ moe.router.t(), None, shape.routing)
    want = stream + shared + run_experts(x, moe.experts.weights(), chosen, shares)
    torch.testing.assert_close(moe(stream.clone()), want)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


MERGED = {"cohere2_moe": 2, "deepseek_v2": 2, "deepseek_v3": 2, "glm4_moe": 2, "hy_v3": 2, "kimi_k2": 1,
          "qwen3_next": 1, "qwen3_5_moe_text": 2}  # fmt: skip


@pytest.mark.parametrize("scheme", ["plain", "fp8"])
@pytest.mark.parametrize("name", MERGED)
def test_a_shared_expert_is_some_of_the_experts(name: str, scheme: str, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Where ops want it so, as on a GPU: the same logits, also in FP8 with all bits kept."""
    monkeypatch.setattr(loader, "select_ops", lambda *args: replace(REFERENCE, merges_shared=True))
    if scheme == "fp8":
        monkeypatch.setattr(loader, "_choose_scheme", lambda *args: (torch.float32, Fp8InTorch()))
    reference = save_checkpoint(next(family for family in all_families() if family.name == name), tmp_path)
    assert_equal(tmp_path, reference)
    model: Any = load(tmp_path)
    mixtures = [module for module in model.modules() if isinstance(module, MoE)]
    assert mixtures and all(each.shared is None and each.experts.num_shared == MERGED[name] for each in mixtures)


def test_the_deterministic_mode_merges_nothing() -> None:
    pytest.importorskip("triton")
    assert table._triton_ops(strict=True).merges_shared and not table._deterministic_triton_ops().merges_shared


def test_a_shared_expert_of_another_size_stays_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "select_ops", lambda *args: replace(REFERENCE, merges_shared=True))
    config = Qwen2MoeConfig(**TINY, **QWEN, shared_expert_intermediate_size=40)
    assert_equal(tmp_path, save_checkpoint(Family("qwen2_moe", lambda: config, draw_sharp), tmp_path))


def test_a_shared_expert_stays_by_itself_where_the_others_are_two_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "select_ops", lambda *args: replace(REFERENCE, merges_shared=True))
    assert_equal(tmp_path, save_checkpoint(next(f for f in all_families() if f.name == "aria_text"), tmp_path))


def test_a_missing_shared_expert_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "select_ops", lambda *args: replace(REFERENCE, merges_shared=True))
    config = Qwen2MoeConfig(**TINY, **QWEN, shared_expert_intermediate_size=24)
    save_checkpoint(Family("qwen2_moe", lambda: config, draw_sharp), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gone = "model.layers.1.mlp.shared_expert.up_proj.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, tmp_path / "model.safetensors")
    with pytest.raises(QuireError, match=f"lacks tensor {gone}"):
        load(tmp_path)


def test_missing_experts_are_named(tmp_path: Path) -> None:
    qwen3_moe(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gone = [n for n in tensors if ".layers.1.mlp.experts.3." in n or ".layers.1.mlp.experts.5.up_proj" in n]
    save_file({n: t for n, t in tensors.items() if n not in gone}, tmp_path / "model.safetensors")
    with pytest.raises(QuireError, match=r"lacks experts 3, 5 of model\.layers\.1\.mlp\."):
        load(tmp_path)


def test_stacked_experts_are_the_same(tmp_path: Path) -> None:
    reference = qwen3_moe(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for matrix in ("gate_proj", "up_proj", "down_proj"):
        for layer in range(2):
            prefix = f"model.layers.{layer}.mlp.experts"
            parts = [tensors.pop(f"{prefix}.{e}.{matrix}.weight") for e in range(QWEN["num_experts"])]
            tensors[f"{prefix}.{matrix}.weight"] = torch.stack(parts)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_equal(tmp_path, reference)


@pytest.mark.parametrize("arch", ["qwen3moe", "llama"])
def test_experts_of_gguf_files(arch: str, tmp_path: Path) -> None:
    """Quantized, and as llama.cpp's converter names them; Mixtral calls itself llama there."""
    fields = {**TINY, "num_experts_per_tok": 2, "intermediate_size": 64}
    config = MixtralConfig(**fields, num_local_experts=4) if arch == "llama" else Qwen3MoeConfig(
        **fields, num_experts=4, moe_intermediate_size=32, head_dim=16, norm_topk_prob=True)  # fmt: skip
    reference = save_checkpoint(Family("", lambda: config, draw_sharp), tmp_path)
    for name, parameter in reference.named_parameters():
        if name.endswith("experts.down_proj"):  # what Q8_0 keeps of it
            kind = gguf.GGMLQuantizationType.Q8_0
            array = gguf.quants.quantize(parameter.detach().numpy(), kind)
            parameter.data.copy_(torch.from_numpy(gguf.quants.dequantize(array, kind)))
    metadata = {f"{arch}.expert_count": 4, f"{arch}.expert_used_count": 2, f"{arch}.expert_feed_forward_length": 32}
    types = {r"blk\.\d+\.ffn_down_exps\.weight": "Q8_0"}
    write_gguf(reference, arch, tmp_path / "tiny.gguf", types=types, metadata=metadata)
    assert_equal(tmp_path / "tiny.gguf", reference)


def test_mxfp4_experts_are_decoded(tmp_path: Path) -> None:
    config = GptOssConfig(**TINY, num_local_experts=4, num_experts_per_tok=2, head_dim=16, rope_parameters=STRETCHED)
    reference = save_checkpoint(Family("gpt_oss", lambda: config, draw_sharp), tmp_path)
    with torch.no_grad():
        for name, matrices in pack_mxfp4(tmp_path).items():
            reference.get_parameter(name).copy_(matrices.transpose(1, 2))
    with pytest.warns(UserWarning, match=r"is quantized \(MXFP4\); its weights are decoded to float32"):
        assert_equal(tmp_path, reference)


@pytest.mark.skipif(table.select_ops("cpu").native is None, reason="the native library is not built")
def test_mxfp4_experts_stay_small_on_a_cpu(tmp_path: Path) -> None:
    """In the checkpoint's own blocks, gates and ups out of their turns."""
    sizes = {**TINY, "intermediate_size": 64}
    config = GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2, head_dim=16, rope_parameters=STRETCHED)
    save_checkpoint(Family("gpt_oss", lambda: config, draw_sharp), tmp_path)
    decoded = pack_mxfp4(tmp_path)
    model: Any = load(tmp_path, dtype="auto")
    experts = next(module for name, module in model.named_modules() if name.endswith("1.mlp.experts"))
    for got, name in ((experts.gate_up, "gate_up_proj"), (experts.down, "down_proj")):
        assert {part.form for part in got} == {"MXFP4"}
        want = decoded[f"model.layers.1.mlp.experts.{name}"]
        want = torch.cat((want[:, 0::2], want[:, 1::2]), 1) if name == "gate_up_proj" else want
        assert torch.equal(torch.cat([part.rows(torch.arange(part.shape[0])) for part in got]), want.flatten(0, 1))


def pack_mxfp4(folder: Path) -> dict[str, Tensor]:
    """Random experts in MXFP4; returns what they stand for, [experts, rows, columns]."""
    tensors = load_file(folder / "model.safetensors")
    generator, decoded = torch.Generator().manual_seed(4), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (num, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 126, (num, rows, columns // 32), dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        decoded[name] = dequantize_mxfp4(blocks, scales)
    save_file(tensors, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": {"quant_method": "mxfp4"}}))
    return decoded


def test_mxfp4_numbers() -> None:
    blocks = torch.tensor([[0x21, 0x7F, *[0] * 14]], dtype=torch.uint8)
    got = dequantize_mxfp4(blocks, torch.tensor([128], dtype=torch.uint8))
    assert got[:5].tolist() == [1.0, 2.0, -12.0, 12.0, 0.0] and got.shape == (32,)


def test_mxfp4_numbers_stay_what_they_are_in_fp8() -> None:
    generator = torch.Generator().manual_seed(5)
    blocks = torch.randint(0, 256, (40, 6, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(112, 125, (40, 6), dtype=torch.uint8, generator=generator)
    matrix = dequantize_mxfp4(blocks, scales)
    matrix[3] = 0.0
    assert torch.equal(plain_matrix(*quantize_matrix(matrix), torch.float32), matrix)


def test_what_is_no_number_is_none_in_fp8() -> None:
    matrix = torch.ones(3, 32)
    matrix[0, 5], matrix[1, 7] = torch.inf, torch.nan
    got = plain_matrix(*quantize_matrix(matrix), torch.float32)
    assert got[:2].isnan().all() and torch.equal(got[2], matrix[2])


def test_other_numbers_are_rounded_to_fp8() -> None:
    matrix = torch.randn(50, 64, generator=torch.Generator().manual_seed(6)) * torch.logspace(-6, 3, 50)[:, None]
    values, scales = quantize_matrix(matrix)
    assert values.dtype == torch.float8_e4m3fn
    most = values.float().abs().amax(1)
    assert ((most > 200) & (most <= 448)).all(), "as much of the range as a power of two lets it have"
    off = plain_matrix(values, scales, torch.float32) - matrix
    allowed = matrix.abs() / 16 + scales[:, None] * 2.0**-10  # half a unit in the last place
    assert (off.abs() <= allowed).all()


@pytest.mark.parametrize("fields", [
    {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8},
    {"hidden_activation": "silu", "hidden_size_per_layer_input": 0},
    {"top_k_experts": 8, "hidden_size_per_layer_input": 0},
    {"attention_bias": True, "attention_k_eq_v": True, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8},
], ids=["shared keys, inputs per layer", "silu", "all experts", "biases"])  # fmt: skip
def test_gemma_4_has_experts_beside_all_else(fields: dict[str, Any], tmp_path: Path) -> None:
    assert_equal(tmp_path, save_checkpoint(Family("", lambda: gemma4(**fields), draw_routed), tmp_path))


def test_gemma_4_with_experts_as_it_is_published(tmp_path: Path) -> None:
    """Beside a tower for images, whose tensors are left alone; its wide heads are said once for all layers."""
    wide = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 32}
    config = gemma4(**wide, hidden_size_per_layer_input=0)
    reference = save_checkpoint(Family("", lambda: config, draw_routed), tmp_path)
    text = {key: value for key, value in config.to_dict().items() if key != "per_layer_config"}
    text |= {**wide, "use_bidirectional_attention": "vision"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4", "text_config": text}))
    tensors = load_file(tmp_path / "model.safetensors")
    published = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file({**published, "model.vision_tower.patch.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    assert_equal(tmp_path, reference)


def test_gemma_4_says_which_experts_do_not_fit(tmp_path: Path) -> None:
    save_checkpoint(Family("", lambda: gemma4(hidden_size_per_layer_input=0), draw_routed), tmp_path)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.2.experts.gate_up_proj"

    def refused(name: str, instead: Tensor | None) -> str:
        changed = {**tensors, name: instead}
        save_file({key: value for key, value in changed.items() if value is not None}, tmp_path / "model.safetensors")
        with pytest.raises(QuireError) as caught:
            load(tmp_path)
        assert caught.value.code == "bad_weights" and "\n" not in str(caught.value)
        return str(caught.value)

    assert f"lacks tensor {name}" in refused(name, None)
    scale = "model.layers.2.router.per_expert_scale"
    assert f"lacks tensor {scale}" in refused(scale, None)
    said = refused(name, tensors[name][:-1].clone())
    assert name in said and "wrong shape" in said and "7" in said
    said = refused(name, tensors[name][:, :-2].clone())
    assert name in said and "wrong shape" in said and "318" in said
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "enable_moe_block": False}))
    with pytest.raises(QuireError, match="which this model does not have"):
        load(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Configs

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "activation": ({"hidden_act": "mish"}, "Activation 'mish'"),
    "rope": ({"rope_parameters": {"rope_type": "spiral"}}, "Rope scaling 'spiral'"),
    "layer type": ({"layer_types": ["full_attention", "round_attention"]}, "round_attention"),
    "too many experts a token": ({"num_experts_per_tok": 9}, "can't choose 9 experts per token from 8"),
    "no experts": ({"num_local_experts": 0}, "num_local_experts=0"),
    "heads": ({"num_attention_heads": 3}, "3 heads of size 16 with 2"),
    "dense layers": ({"mlp_only_layers": [7]}, r"mlp_only_layers=\[7\]"),
}
BAD_LATENT: dict[str, tuple[dict[str, Any], str]] = {
    "groups": ({"n_group": 5}, "12 experts can't be divided into 5 groups"),
    "shared": ({"n_shared_experts": -1}, "the width -24 of the shared expert is negative"),
    "few groups": ({"num_experts_per_tok": 7}, "2 of 4 groups of 3 experts have fewer than the 7 experts"),
    "small groups": ({"n_group": 12, "topk_group": 6}, "groups of 1 experts can't be scored by their best 2"),
    "method": ({"topk_method": "lottery"}, "topk_method='lottery'"),
    "odd rope": ({"qk_rope_head_dim": 15}, "qk_rope_head_dim=15"),
    "dense layers": ({"first_k_dense_replace": 9}, "first_k_dense_replace=9"),
}

BAD_GEMMA: dict[str, tuple[dict[str, Any], str]] = {
    "activation": ({"hidden_activation": "relu"}, "Activation 'relu' is not supported in experts"),
    "unknown activation": ({"hidden_activation": "mish"}, "Activation 'mish'"),
    "no number of experts": ({"num_experts": None}, "num_experts=None"),
    "no experts a token": ({"top_k_experts": 0}, "top_k_experts=0"),
    "too many experts a token": ({"top_k_experts": 9}, "can't choose 9 experts per token from 8"),
    "no size": ({"moe_intermediate_size": None}, "moe_intermediate_size=None"),
    "neither yes nor no": ({"enable_moe_block": "yes"}, "enable_moe_block='yes'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_configs_name_the_field(name: str) -> None:
    fields, message = BAD[name]
    config = Qwen3MoeConfig(**TINY, **QWEN, head_dim=16).to_dict()
    with pytest.raises(QuireError, match=message):
        build_model({**config, **fields}, dtype="float32", device=torch.device("cpu"), page_tokens=16)


@pytest.mark.parametrize("name", BAD_LATENT)
def test_bad_latent_configs_name_the_field(name: str) -> None:
    fields, message = BAD_LATENT[name]
    config = DeepseekV3Config(**LATENT, **GROUPS, q_lora_rank=28).to_dict()
    with pytest.raises(QuireError, match=message):
        build_model({**config, **fields}, dtype="float32", device=torch.device("cpu"), page_tokens=16)


@pytest.mark.parametrize("name", BAD_GEMMA)
def test_bad_configs_of_gemma_4_name_the_field(name: str) -> None:
    fields, message = BAD_GEMMA[name]
    with pytest.raises(QuireError, match=message):
        build_model({**gemma4().to_dict(), **fields}, dtype="float32", device=torch.device("cpu"), page_tokens=16)


# ---------------------------------------------------------------------------------------------------------------------
# Memory


@pytest.mark.parametrize(
    "config",
    [
        DeepseekV3Config(**LATENT, **GROUPS, q_lora_rank=28),
        GptOssConfig(**TINY, num_local_experts=4, num_experts_per_tok=2, head_dim=16, rope_parameters=STRETCHED),
        MixtralConfig(**TINY, num_local_experts=4),
    ],
    ids=lambda config: config.model_type,
)
def test_the_memory_plan_is_what_is_allocated(config: Any, tmp_path: Path) -> None:
    """What `quire doctor` says of weights and pools, against the tensors that are there."""
    save_checkpoint(Family(config.model_type, lambda: config, draw_sharp), tmp_path)
    knobs = {"model": str(tmp_path), "cache_memory": 8 << 20, "max_model_len": 256, "max_rows": 4, "device": "cpu"}
    plan = memory_report(override_config(Config(), knobs))
    model: Any = load(tmp_path, page_tokens=16)
    assert plan.weights == sum(p.nbytes for p in model.parameters())
    engine = make_engine(model, max_len=256, max_rows=4, page_tokens=16, num_pages=plan.num_units[0])
    allocated = sum(tensor.nbytes for tensor in engine.workers.inner.store.tensors.values())
    assert abs(plan.cache - allocated) <= 0.02 * allocated
    assert abs(plan.cache - (8 << 20)) <= 0.02 * (8 << 20)
