"""Model folders: strict loading, shards, defaults, memory, random weights; and that every refusal says what and why."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.files.source import ModelFiles, resolve_model
from quire.layers.quant import Fp16Packed
from quire.layers.weights import iter_weights, weights_bytes
from quire.models.loading import loader
from quire.models.loading.loader import LoadedModel, build_model, load_model, resolve_dtype
from quire.types import QuireError
from tests.cpu.families.harness import all_families, save_checkpoint
from tests.cpu.paged_harness import HarnessRow, PagedHarness
from tests.cpu.tiny_models import make_tiny

CPU = torch.device("cpu")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load(folder: Path, **options: Any) -> LoadedModel:
    files = resolve_model(str(folder), random_weights=options.get("random_weights", False))
    given = {"dtype": "auto", "device": CPU, "max_model_len": None, "page_tokens": 16, **options}
    return load_model(files, **given)


def edit_weights(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, name: str = "config.json", **fields: Any) -> None:
    config = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**config, **fields}))


def refused(folder: Path, code: str, word: str, **options: Any) -> None:
    with pytest.raises(QuireError, match=re.escape(word)) as error:
        load(folder, **options)
    assert error.value.code == code
    assert "\n" not in str(error.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny("qwen2", tmp_path / "tiny")[1]


# ---------------------------------------------------------------------------------------------------------------------
# Strict loading


def test_missing_tensor_is_named(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.bias"))
    refused(folder, "bad_weights", "lacks tensor model.layers.1.self_attn.k_proj.bias")


def test_unexpected_tensor_is_named(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.layers.7.mystery": torch.zeros(3)}))
    refused(folder, "bad_weights", "model.layers.7.mystery")


def test_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(64, 96)}))
    with pytest.raises(QuireError) as error:
        load(folder)
    for word in ("model.layers.0.mlp.up_proj.weight", "[64, 96]", "[96, 64]"):
        assert word in str(error.value)


def test_needless_tensors_are_let_pass(tmp_path: Path) -> None:
    folder = make_tiny("smollm2", tmp_path)[1]
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    edit_weights(folder, lambda tensors: tensors.update(extra, **{HEAD: tensors[EMBEDDING].clone()}))
    load(folder)


@pytest.mark.parametrize("head", [torch.zeros(256, 96), torch.zeros(250, 96)], ids=["other", "smaller"])
def test_a_tied_head_must_be_the_embedding(head: torch.Tensor, tmp_path: Path) -> None:
    """transformers goes by the checkpoint where it holds another head than config.json promises."""
    folder = make_tiny("smollm2", tmp_path)[1]
    edit_weights(folder, lambda tensors: tensors.update({HEAD: head}))
    with pytest.raises(
        QuireError, match=r"lm_head.weight, which is not model.embed_tokens.weight.*tie_word_embeddings"
    ):
        load(folder)


def test_untied_head_must_be_there(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop("lm_head.weight"))
    refused(folder, "bad_weights", "lm_head.weight")


def test_quantized_tensors_are_refused(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    edit_weights(folder, lambda tensors: tensors.update({name: torch.zeros(96, 64, dtype=torch.int8)}))
    refused(folder, "unsupported_model", name)


@pytest.mark.parametrize("cut", [1, 1000])
def test_truncated_file_is_refused(folder: Path, cut: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-cut])
    refused(folder, "bad_safetensors", "model.safetensors")


def test_shards_load_like_one_file(folder: Path) -> None:
    whole: Any = load(folder).model
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {f"model-0000{i + 1}-of-00003.safetensors": names[i::3] for i in range(3)}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sharded: Any = load(folder).model
    for a, b in zip(whole.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(a, b)


def test_half_precision_checkpoint_is_widened(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({k: v.bfloat16() for k, v in tensors.items()}))
    loaded = load(folder)
    model: Any = loaded.model
    assert loaded.dtype == "float32"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_nothing_is_left_on_meta(folder: Path) -> None:
    model: Any = load(folder).model
    assert not list(iter_weights(model))
    assert not any(parameter.is_meta or parameter.requires_grad for parameter in model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# Configs


def test_unsupported_model_names_what_is_supported(folder: Path) -> None:
    edit_config(folder, model_type="no_such_model")
    refused(folder, "unsupported_model", "no_such_model is not supported")
    edit_config(folder, model_type="lama")
    refused(folder, "unsupported_model", "Similar types: llama. docs/models.md lists all ")


def test_architecture_stands_in_for_model_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"]
    (folder / "config.json").write_text(json.dumps(config))
    load(folder)


@pytest.mark.parametrize(("fields", "code", "word"), [
    ({"hidden_size": None}, "bad_config", "hidden_size=None"),
    ({"num_attention_heads": "4"}, "bad_config", "num_attention_heads='4'"),
    ({"num_key_value_heads": 3}, "bad_config", "3 key-value heads"),
    ({"use_sliding_window": True, "sliding_window": 0}, "bad_config", "sliding_window=0"),
    ({"hidden_act": "xielu"}, "unsupported_model", "xielu"),
    ({"rope_parameters": {"rope_type": "spiral"}}, "unsupported_model", "spiral"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "bad_config", "short_factor, a list of numbers"),
    ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0, 2.0]}}, "bad_config", "2 factors"),
    ({"rope_parameters": {"partial_rotary_factor": 0.33}}, "bad_config", "partial_rotary_factor=0.33"),
    ({"hidden_size": 66, "head_dim": None}, "bad_config", "hidden_size=66 does not divide into 4 heads"),
    ({"layer_types": ["full_attention"] * 2}, "bad_config", "layer_types has 2 entries"),
    ({"layer_types": ["linear_attention"] * 3}, "unsupported_model", "Layer type 'linear_attention'"),
    ({"quantization_config": {"quant_method": "hqq"}}, "unsupported_model", "hqq"),
])  # fmt: skip
def test_bad_configs_are_refused(folder: Path, fields: dict[str, Any], code: str, word: str) -> None:
    edit_config(folder, **fields)
    refused(folder, code, word)


def test_older_rope_fields_are_read(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}  # fmt: skip
    folder = make_tiny("llama3", tmp_path)[1]
    new = load(folder).config
    edit_config(folder, rope_parameters=None, rope_scaling=rope, rope_theta=10000.0)
    assert load(folder).config == new
    assert new.ropes[0].kind == "llama3"


def test_queries_grow_only_where_sequences_get_so_long(tmp_path: Path) -> None:
    """Ministral 3 within the positions of its first training is Mistral, and as quick."""
    family = next(family for family in all_families() if family.name == "ministral3")
    save_checkpoint(family, tmp_path)
    for max_len, grows in ((32, False), (33, True), (None, True)):
        model: Any = load(tmp_path, max_model_len=max_len).model
        assert (model.config.query_scaling is not None) == grows and model.fits_native(model.config) != grows
    assert torch.allclose(model.config.query_scaling.at(torch.tensor([-1, 0, 31, 32, 96])).flatten(),
                          1 + 0.1 * torch.log(torch.tensor([1.0, 1.0, 1.0, 2.0, 4.0])))  # fmt: skip


def test_max_model_len(folder: Path) -> None:
    assert load(folder).max_model_len == 512
    assert load(folder, max_model_len=100).max_model_len == 100
    refused(folder, "invalid_parameter", "max_model_len=513", max_model_len=513)


def test_generation_config_is_honoured(folder: Path) -> None:
    assert load(folder).eos_ids == (2,)
    fields = {"eos_token_id": [7, 9], "do_sample": True, "temperature": 0.6, "top_k": 20, "min_p": None}
    edit_config(folder, "generation_config.json", **fields)
    loaded = load(folder)
    assert loaded.eos_ids == (7, 9)
    assert loaded.generation_defaults == {"temperature": 0.6, "top_k": 20}
    edit_config(folder, "generation_config.json", do_sample=False)
    assert load(folder).generation_defaults == {}


@pytest.mark.parametrize("given", ["</s>", [2, "2"], -1, [2, 256], True, 2.0, {"id": 2}, [[2]]], ids=str)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_what_no_token_can_be_ends_no_sequence(folder: Path, file: str, given: Any) -> None:
    """It would never match, and every answer would run on to its last allowed token."""
    edit_config(folder, "generation_config.json", eos_token_id=None)
    edit_config(folder, file, eos_token_id=given)
    wrong = given[-1] if isinstance(given, list) else given
    refused(folder, "bad_config", f"eos_token_id in {file} has {wrong!r}, which is not among the model's 256 tokens")


def test_a_model_may_have_no_token_to_end_with(folder: Path) -> None:
    edit_config(folder, "generation_config.json", eos_token_id=[])
    assert load(folder).eos_ids == ()
    edit_config(folder, "generation_config.json", eos_token_id=[0, 255])
    assert load(folder).eos_ids == (0, 255)


def test_auto_dtype() -> None:
    cuda = torch.device("cuda")
    assert resolve_dtype("auto", CPU, {"dtype": "bfloat16"}) == "float32"
    assert resolve_dtype("auto", cuda, {"torch_dtype": "float16"}) == "float16"
    assert resolve_dtype("auto", cuda, {}) == "bfloat16"
    assert resolve_dtype("float32", cuda, {"dtype": "bfloat16"}) == "float32"


@pytest.mark.skipif(not Fp16Packed.is_supported(), reason="this CPU has no fbgemm")
@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("family", ["qwen2", "smollm2"])
def test_float16_on_a_cpu_keeps_packed_weights_and_float32_activations(
    family: str, kernels: str, tmp_path: Path
) -> None:
    reference, folder = make_tiny(family, tmp_path)
    loaded, exact = load(folder, dtype="float16", kernels=kernels), load(folder, kernels=kernels)
    assert (loaded.dtype, loaded.model.specs[0].dtype) == ("float16", "float32")
    assert 0.5 * exact.weights_bytes < loaded.weights_bytes < 0.85 * exact.weights_bytes
    row = HarnessRow(list(range(50, 90)))
    got = PagedHarness(loaded.model, num_pages=8, seed=0).step([(row, 40)])
    with torch.inference_mode():
        want = reference(torch.tensor([row.tokens])).logits[0]
    error = (got - want).abs().max() / want.abs().max()
    assert 0 < error < 5e-3


# ---------------------------------------------------------------------------------------------------------------------
# Memory and random weights


def test_model_too_large_gives_both_figures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "available_memory", lambda device: 1000)
    refused(folder, "model_too_large", "1.0 kB")
    refused(folder, "model_too_large", "503.0 kB")


def test_estimate_is_what_gets_loaded(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    model: Any = load(folder, kernels="torch").model
    total = sum(parameter.nbytes for parameter in model.parameters())
    on_meta = {
        dtype: build_model(config, dtype=dtype, device=CPU, page_tokens=16)[0] for dtype in ("float32", "bfloat16")
    }
    assert weights_bytes(on_meta["float32"]) == load(folder).weights_bytes == total
    assert weights_bytes(on_meta["bfloat16"]) * 2 == total


def test_random_weights_need_only_a_config(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    first: Any = load(folder, random_weights=True, kernels="torch").model
    second: Any = load(folder, random_weights=True, kernels="torch").model
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()
    assert 0.01 < first.embedding.weight.std() < 0.04
    row = HarnessRow(list(range(50, 90)))
    logits = PagedHarness(load(folder, random_weights=True).model, num_pages=8, seed=0).step([(row, 40)])
    assert logits.isfinite().all() and logits.std() > 0


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_progress_counts_up_to_the_whole(dtype: str, tmp_path: Path) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.total, self.seen, self.ended = 0, [0], False

        def start(self, what: str, total: int, done: int = 0) -> None:
            self.total = total

        def update(self, done: int) -> None:
            self.seen.append(done)

        def finish(self) -> None:
            self.ended = True

        def note(self, line: str) -> None: ...

    recorder = Recorder()
    loaded = load(make_tiny("smollm2", tmp_path)[1], progress=recorder, dtype=dtype)
    assert recorder.seen == sorted(recorder.seen)
    assert recorder.seen[-1] == recorder.total == loaded.weights_bytes
    assert recorder.ended


def test_files_may_be_given_directly(folder: Path) -> None:
    files = ModelFiles("folder", folder, "tiny", json.loads((folder / "config.json").read_text()))
    assert load_model(files, dtype="float32", device=CPU, max_model_len=None, page_tokens=8).model.vocab_size == 256
