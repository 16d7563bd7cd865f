"""GGUF files: the same logits as the checkpoint they were written from, and as transformers reads the built-in one."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from quire.files.source import ModelFiles, resolve_model
from quire.kernels.formats.gguf_blocks import FORMATS
from quire.kernels.formats.gguf_grids import SIZES as GRIDS
from quire.models.gguf.tensor_names import hf_name
from quire.models.loading.loader import LoadedModel, load_model
from quire.types import QuireError
from tests.cpu.families.harness import TINY, Family, all_families, save_checkpoint
from tests.cpu.paged_harness import HarnessRow, PagedHarness
from tests.cpu.test_kernels_dequant import random_blocks
from tests.cpu.tiny_gguf import gguf_name, quick_reading, transformers_from_gguf, write_gguf
from tests.cpu.tiny_models import make_tiny

CPU = torch.device("cpu")


def load(path: Path) -> LoadedModel:
    return load_model(resolve_model(str(path)), dtype="auto", device=CPU, max_model_len=None, page_tokens=4)


def assert_same_logits(loaded: LoadedModel, reference: Any) -> None:
    rng = random.Random(2)
    row = HarnessRow([rng.randrange(256) for _ in range(40)])
    harness = PagedHarness(loaded.model, num_pages=16, seed=2)
    got = torch.cat([harness.step([(row, count)]) for count in (13, 20, 1, 1, 5)])
    with torch.inference_mode():
        want = reference(torch.tensor([row.tokens])).logits[0]
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


@pytest.mark.parametrize(("family", "arch"), [("llama", "llama"), ("smollm2", "llama"), ("qwen2", "qwen2"),
                                              ("qwen3", "qwen3"), ("mistral", "llama")])  # fmt: skip
def test_written_and_read_back(family: str, arch: str, tmp_path: Path) -> None:
    reference, _ = make_tiny(family, tmp_path / "hf")
    path = tmp_path / "tiny.gguf"
    metadata = {"llama.attention.sliding_window": 11} if family == "mistral" else {}
    write_gguf(reference, arch, path, metadata=metadata)
    loaded = load(path)
    assert [spec.window for spec in loaded.model.specs] == [11 if family == "mistral" else None]
    assert_same_logits(loaded, reference)


def test_split_in_parts(tmp_path: Path) -> None:
    """As the `gguf` package splits a file: a first part of metadata alone, then some tensors in each."""
    reference, _ = make_tiny("llama", tmp_path / "hf")
    write_gguf(reference, "llama", tmp_path / "m.gguf", split_tensors=5)
    parts = sorted(tmp_path.glob("m-*-of-*.gguf"))
    assert len(parts) > 3
    for place in (parts[0], parts[2]):
        assert_same_logits(load(place), reference)


def test_a_vision_part_beside_the_model(tmp_path: Path) -> None:
    """A note names it and text is served; named as the model, it is refused."""
    reference, _ = make_tiny("llama", tmp_path / "hf")
    write_gguf(reference, "llama", tmp_path / "m.gguf")
    vision = tmp_path / "mmproj-m.gguf"
    write_gguf(reference, "llama", vision, metadata={"general.type": "mmproj"})
    with pytest.warns(UserWarning, match=r"text-only model; mmproj-m\.gguf, its vision part, is not loaded"):
        assert_same_logits(load(tmp_path / "m.gguf"), reference)
    with pytest.raises(QuireError, match=r"mmproj-m\.gguf is the vision part of a model, not the model"):
        load(vision)


EVERY_FOURTH = [True, True, True, False]  # layers with a window
EXPERTS = {"expert_count": 8, "expert_used_count": 3}
GROUPED = {"expert_count": 12, "expert_used_count": 3, "expert_feed_forward_length": 24, "expert_group_count": 4,
           "expert_group_used_count": 2, "leading_dense_block_count": 1}  # fmt: skip
GRANITE_EXPERTS = {"expert_count": 6, "expert_used_count": 2, "embedding_scale": 3.0, "attention.scale": 0.2,
                   "residual_scale": 0.6, "logit_scale": 0.5}  # fmt: skip
# A rope that is slower by a factor of the file's own: converters work out how fast it is.
SLOWER = {"rope.freq_base": 10000.0 * 50.0 ** (32 / 30), "rope.scaling.type": "none", "rope.scaling.factor": 1.0}
# family -> architecture, metadata beyond what every file has
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("arcee", {}),
    "cohere": ("command-r", {"logit_scale": 0.5}),
    "cohere heads normed": ("command-r", {"logit_scale": 0.5}),
    "cohere2": ("cohere2", {"logit_scale": 0.5, "attention.sliding_window": 9}),
    "dots1": ("dots1", {**GROUPED, "expert_shared_count": 2, "expert_weights_norm": False,
                        "expert_weights_scale": 1.0}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5_moe": ("ernie4_5-moe", {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 24,
                                      "expert_shared_count": 1, "leading_dense_block_count": 1,
                                      "interleave_moe_layer_step": 1}),
    "exaone4": ("exaone4", {"attention.sliding_window": 9, "attention.sliding_window_pattern": EVERY_FOURTH}),
    "exaone_moe": ("exaone-moe", {**GROUPED, "attention.sliding_window": 9, "expert_shared_count": 1,
                                  "attention.sliding_window_pattern": EVERY_FOURTH, "expert_weights_norm": True,
                                  "expert_weights_scale": 2.5}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"attention.sliding_window": 11, "attn_logit_softcapping": 3.0,
                          "final_logit_softcapping": 5.0}),
    "gemma3": ("gemma3", {"attention.sliding_window": 9, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0,
                          "final_logit_softcapping": 5.0}),
    "glm": ("chatglm", {}),
    "glm4": ("glm4", {}),
    "glm4_moe": ("glm4moe", {**GROUPED, "expert_shared_count": 2, "expert_weights_norm": True,
                             "expert_weights_scale": 1.0}),
    "gpt_neox": ("gptneox", {"use_parallel_residual": True}),
    "gpt_neox in turn": ("gptneox", {"use_parallel_residual": False}),
    "granite": ("granite", {"embedding_scale": 3.0, "attention.scale": 0.2, "residual_scale": 0.4, "logit_scale": 2.0}),
    "granitemoe": ("granitemoe", GRANITE_EXPERTS),
    "granitemoeshared": ("granitemoe", {**GRANITE_EXPERTS, "expert_shared_feed_forward_length": 40}),
    "hunyuan_v1_dense": ("hunyuan-dense", SLOWER),
    "hunyuan_v1_moe": ("hunyuan-moe", {**SLOWER, "expert_count": 6, "expert_used_count": 2,
                                       "expert_feed_forward_length": 96, "expert_shared_feed_forward_length": 96,
                                       "expert_shared_count": 1}),
    "lfm2": ("lfm2", {"attention.head_count_kv": [0, 2, 0], "feed_forward_length": 64, "shortconv.l_cache": 3,
                      "attention.layer_norm_rms_epsilon": 1e-5}),
    "lfm2_moe": ("lfm2moe", {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3, "expert_count": 8,
                             "expert_used_count": 2, "expert_feed_forward_length": 24, "leading_dense_block_count": 1,
                             "expert_weights_scale": 1.5, "attention.layer_norm_rms_epsilon": 1e-5}),
    "minimax_m2": ("minimax-m2", EXPERTS),
    "ministral3": ("mistral3", {"rope.scaling.type": "yarn", "rope.scaling.factor": 16.0,
                                "rope.scaling.original_context_length": 32, "rope.scaling.yarn_log_multiplier": 1.0,
                                "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0,
                                "attention.temperature_scale": 0.1}),
    "nemotron": ("nemotron", {}),
    "olmo": ("olmo", {}),
    "olmo clipped": ("olmo", {"attention.clamp_kqv": 0.7}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo2", {"attention.sliding_window": 10, "attention.sliding_window_pattern": EVERY_FOURTH,
                        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                        "rope.scaling.original_context_length": 64}),
    "olmoe": ("olmoe", EXPERTS),
    "olmoe clipped": ("olmoe", {**EXPERTS, "attention.clamp_kqv": 0.7}),
    "phi": ("phi2", {}),
    "phi3": ("phi3", {"attention.sliding_window": 13}),
    "phi4": ("phi3", {"rope.scaling.original_context_length": 2}),
    "qwen2_moe": ("qwen2moe", {**EXPERTS, "expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 40}),
    "seed_oss": ("seed_oss", {}),
    "smollm3": ("smollm3", {}),
    "stablelm": ("stablelm", {}),
    "stablelm parallel": ("stablelm", {}),
    "stablelm heads normed": ("stablelm", {}),
    "starcoder2": ("starcoder2", {"attention.sliding_window": 14}),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_architectures_beside_llama(name: str, tmp_path: Path) -> None:
    family = next(family for family in all_families() if family.name == name)
    if name.startswith("gemma") and name != "gemma":  # a GGUF has no room for a scale of its own there
        config = family.config()
        config.query_pre_attn_scalar = config.head_dim
        family = replace(family, config=lambda: config)
    if name == "dots1":  # windows that no file tells of
        config = family.config()
        config.sliding_window, config.layer_types = None, ["full_attention"] * config.num_hidden_layers
        family = replace(family, config=lambda: config)
    arch, metadata = OTHERS[name]
    reference = save_checkpoint(family, tmp_path / "hf")
    extra = {}
    if name == "phi4":
        for kind in ("long", "short"):
            factors = np.array(reference.config.rope_parameters[f"{kind}_factor"], np.float32)
            extra[f"rope_factors_{kind}.weight"] = factors
    path = tmp_path / "tiny.gguf"
    write_gguf(reference, arch, path, metadata={f"{arch}.{key}": value for key, value in metadata.items()}, extra=extra)
    assert_same_logits(load(path), reference)


def test_layers_that_draft_are_left_aside(tmp_path: Path) -> None:
    """They stand behind the others, and count as layers of the file."""
    family = next(family for family in all_families() if family.name == "glm4_moe")
    reference = save_checkpoint(family, tmp_path / "hf")
    metadata = {f"glm4moe.{key}": value for key, value in OTHERS["glm4_moe"][1].items()}
    metadata |= {"glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1}
    extra = {name: np.zeros((64, 64), np.float32) for name in ("blk.2.nextn.eh_proj.weight", "blk.2.attn_q.weight")}
    write_gguf(reference, "glm4moe", tmp_path / "tiny.gguf", metadata=metadata, extra=extra)
    assert_same_logits(load(tmp_path / "tiny.gguf"), reference)


def test_biases_of_permuted_files(tmp_path: Path) -> None:
    reference, _ = make_tiny("llama", tmp_path / "hf", attention_bias=True, mlp_bias=True)
    write_gguf(reference, "llama", tmp_path / "tiny.gguf")
    assert_same_logits(load(tmp_path / "tiny.gguf"), reference)


def test_rope_scaling_kept_as_divisors(tmp_path: Path) -> None:
    reference, _ = make_tiny("llama3", tmp_path / "hf")
    scaled = reference.model.rotary_emb.inv_freq
    plain = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    divisors = (plain / scaled).numpy().astype(np.float32)
    assert divisors.max() > 3
    write_gguf(reference, "llama", tmp_path / "tiny.gguf", extra={"rope_freqs.weight": divisors})
    assert_same_logits(load(tmp_path / "tiny.gguf"), reference)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_from_metadata(kind: str, tmp_path: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    reference, _ = make_tiny("qwen2", tmp_path / "hf", rope_parameters=rope)
    metadata = {
        "qwen2.rope.scaling.type": kind,
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 32,
    }
    write_gguf(reference, "qwen2", tmp_path / "tiny.gguf", metadata=metadata)
    assert_same_logits(load(tmp_path / "tiny.gguf"), reference)


def test_quantized_rows_land_where_float_rows_do(tmp_path: Path) -> None:
    """Q8_0 through the permutation and the merged weights: close to the float file, row by row."""
    reference, _ = make_tiny("llama", tmp_path / "hf")
    write_gguf(reference, "llama", tmp_path / "float.gguf")
    write_gguf(reference, "llama", tmp_path / "q8.gguf", types={r".*\.(attn_[qkv]|ffn_.*|attn_output)\.weight": "Q8_0"})
    exact: Any = load(tmp_path / "float.gguf").model
    rounded: Any = load(tmp_path / "q8.gguf").model
    for a, b in zip(exact.parameters(), rounded.parameters(), strict=True):
        assert (a - b).abs().max() < 0.01
    assert any(not torch.equal(a, b) for a, b in zip(exact.parameters(), rounded.parameters(), strict=True))


@pytest.mark.parametrize("type_name", ["IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", *GRIDS])
def test_types_that_nothing_here_writes(type_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uneven values, three values, and places in grids: random blocks of them become what the gguf package makes of
    them, in floats and kept as Q8_0."""
    sizes = {**TINY, "hidden_size": 256, "intermediate_size": 256}
    reference = save_checkpoint(Family("", lambda: LlamaConfig(**sizes)), tmp_path / "hf")
    kind = gguf.GGMLQuantizationType[type_name]
    written = random_blocks(type_name, 256 * 256 // FORMATS[type_name].elements, seed=3)
    monkeypatch.setattr(gguf.quants, "quantize", lambda array, _: written.reshape(256, -1))
    write_gguf(reference, "llama", tmp_path / "m.gguf", types={r"blk.1.ffn_down.weight": type_name})
    want = torch.from_numpy(gguf.quants.dequantize(written.reshape(256, -1), kind))
    floats: Any = load_model(resolve_model(str(tmp_path / "m.gguf")), dtype="float32", device=CPU, max_model_len=None,
                             page_tokens=4, kernels="torch").model  # fmt: skip
    assert torch.equal(floats.layers[1].mlp.down.weight, want)
    kept: Any = load(tmp_path / "m.gguf").model.layers[1].mlp.down  # type: ignore[attr-defined]
    if hasattr(kept, "packed"):
        rows = kept.packed.parts[0].rows(torch.arange(256))
        largest = want.view(256, 8, 32).abs().amax(2, keepdim=True)
        loss = 0.0 if type_name == "IQ4_NL" else 2.0**-11 + 1 / 254
        least = 127 * 2.0**-25  # half of the least step of a float16, for scales as small as random ones
        assert ((rows - want).view(256, 8, 32).abs() <= loss * largest + (least if loss else 0.0)).all()


def test_names_map_one_to_one() -> None:
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "model.layers.12.mlp.up_proj.bias",
                 "model.layers.3.self_attn.k_proj.weight", "model.layers.0.self_attn.q_norm.weight"):  # fmt: skip
        assert hf_name(gguf_name(name)) == name
    assert hf_name("blk.0.attn_mystery.weight") == "blk.0.attn_mystery.weight"


def test_sampling_defaults_come_along(tmp_path: Path) -> None:
    reference, _ = make_tiny("llama", tmp_path / "hf")
    metadata = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    write_gguf(reference, "llama", tmp_path / "tiny.gguf", metadata=metadata)
    assert load(tmp_path / "tiny.gguf").generation_defaults == {"temperature": 0.5, "top_k": 20}
    known = ModelFiles("gguf", tmp_path / "tiny.gguf", "tiny", None, {"temperature": 0.2, "top_p": 0.9})
    loaded = load_model(known, dtype="float32", device=CPU, max_model_len=None, page_tokens=16)
    assert loaded.generation_defaults == {"temperature": 0.5, "top_k": 20, "top_p": 0.9}, "the file knows best"


@pytest.mark.parametrize(("arch", "metadata", "code", "word"), [
    ("mamba", {}, "unsupported_model", "mamba"),
    ("qwen2", {"qwen2.expert_count": 8}, "unsupported_model", "mixture"),
    ("llama", {"llama.rope.scaling.type": "longrope"}, "unsupported_model", "longrope"),
])  # fmt: skip
def test_what_is_not_supported_is_named(arch: str, metadata: dict, code: str, word: str, tmp_path: Path) -> None:
    reference, _ = make_tiny("llama", tmp_path / "hf")
    write_gguf(reference, arch, tmp_path / "tiny.gguf", metadata=metadata)
    with pytest.raises(QuireError, match=word) as error:
        load(tmp_path / "tiny.gguf")
    assert error.value.code == code


def test_unknown_and_missing_tensors_are_named(tmp_path: Path) -> None:
    reference, _ = make_tiny("llama", tmp_path / "hf")
    write_gguf(reference, "llama", tmp_path / "more.gguf", extra={"blk.0.extra.weight": np.zeros(4, np.float32)})
    with pytest.raises(QuireError, match=r"blk\.0\.extra\.weight") as error:
        load(tmp_path / "more.gguf")
    assert error.value.code == "bad_weights"
    write_gguf(reference, "llama", tmp_path / "less.gguf", without="blk.1.ffn_up.weight")
    with pytest.raises(QuireError, match=r"model\.layers\.1\.mlp\.up_proj\.weight") as error:
        load(tmp_path / "less.gguf")
    assert error.value.code == "bad_weights"


@pytest.fixture(scope="module")
def built_in() -> Any:
    try:
        return resolve_model("smollm2", offline=True)
    except QuireError as error:
        pytest.skip(f"the built-in model is not on this disk: {error}")


def test_built_in_model_reads_as_transformers_reads_it(built_in: Any) -> None:
    loaded = load_model(built_in, dtype="float32", device=CPU, max_model_len=256, page_tokens=16)
    assert loaded.max_model_len == 256
    assert loaded.generation_defaults == {"temperature": 0.2}, "as its card has it"
    assert loaded.weights_bytes == 134515008 * 4
    with quick_reading():
        reference = transformers_from_gguf(built_in.path)
    row = HarnessRow([1, 4093, 198, 19556, 314, 253, 1183, 33, 1201, 2, 198, 1, 520, 9531, 198, 36, 5248])
    harness = PagedHarness(loaded.model, num_pages=8, seed=0)
    got = torch.cat([harness.step([(row, count)]) for count in (9, 7, 1)])
    with torch.inference_mode():
        want = reference(torch.tensor([row.tokens])).logits[0]
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()
