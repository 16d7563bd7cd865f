"""The fallback through transformers: what it refuses, what it says, and that it notices a model it gets wrong.

That it is right for those it takes is shown in `families/others.py`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire import LLM
from quire.config import Config
from quire.config_build import override_config
from quire.files.source import resolve_model
from quire.kernels.table import REFERENCE
from quire.layers.build import Build
from quire.models import registry
from quire.models.fallback import model as fallback
from quire.models.fallback import tensor_names as fallback_names
from quire.models.loading.language_model_part import language_model_config
from quire.models.loading.loader import build_model, load_model
from quire.startup.cache_plan import memory_report
from quire.types import QuireError
from tests.cpu.families.experts import draw_sharp
from tests.cpu.families.harness import TINY, Family, save_checkpoint
from tests.cpu.families.more_types import small_config, small_with_eyes
from tests.cpu.paged_harness import assert_equals_transformers
from tests.cpu.tiny_llm import make_tiny_llm

pytestmark = pytest.mark.filterwarnings("ignore:.*has no family of its own")
CPU = torch.device("cpu")


def build(config: dict[str, Any], **options: Any) -> Any:
    return build_model(config, dtype="float32", device=CPU, page_tokens=4, **options)[0]


@pytest.mark.parametrize(("config", "words"), [
    ({"model_type": "openai-gpt", "n_head": 2}, ("openai-gpt", "a state in a form of its own")),
    ({"model_type": "deepseek_v4"}, ("deepseek_v4", "its layer type", "keeps a state in a form of its own")),
    ({"model_type": "xmod", "num_attention_heads": 2}, ("xmod", "a dry run of it failed", "language unknown")),
    ({"model_type": "bart"}, ("bart", "can't be replaced")),
    ({"model_type": "no_such_model"}, ("no_such_model is not supported", "no causal model of that type")),
    ({"model_type": "opt", "num_hidden_layers": "many"}, ("opt", "refuses this")),
    ({"model_type": "bailing_hybrid", "layer_types": ["linear_attention", "magic"]}, ("bailing_hybrid", "type magic")),
])  # fmt: skip
def test_what_it_can_not_run_is_named(config: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(QuireError) as error:
        build({"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, **config})
    assert error.value.code in ("unsupported_model", "bad_config")
    assert all(word in str(error.value) for word in words), str(error.value)


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(QuireError, match=r"opt has no family of its own.*pip install"):
        build({"model_type": "opt"})


def test_weights_are_not_quantized_there(monkeypatch: pytest.MonkeyPatch) -> None:
    config = fallback.FallbackModel.read_config({"model_type": "opt"})
    with pytest.raises(QuireError, match="can't be quantized"):
        scheme: Any = object()
        fallback.FallbackModel(config, build=Build.plain(torch.float32, REFERENCE, scheme))


def save_opt(folder: Path) -> Path:
    config = transformers.OPTConfig(**TINY, ffn_dim=96, word_embed_proj_dim=64)
    save_checkpoint(Family("opt", lambda: config), folder)
    return folder


def load(folder: Path) -> Any:
    files = resolve_model(str(folder))
    return load_model(files, dtype="float32", device=CPU, max_model_len=None, page_tokens=4)


def test_it_says_so_at_start(tmp_path: Path) -> None:
    """To whoever starts it: in Python as a warning, on the command line as a note, and to who asks beforehand."""
    make_tiny_llm(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    save_opt(tmp_path)
    with pytest.warns(
        UserWarning, match=r"^opt has no family of its own: it runs through transformers, correctly but slower\.$"
    ):
        LLM(str(tmp_path), dtype="float32", num_pages=50, max_model_len=100).close()
    command = [sys.executable, "-m", "quire", "run", "--model", str(tmp_path), "--max-tokens", "2", "--num-pages", "50"]
    done = subprocess.run([*command, "--max-model-len", "100", "z"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("quire: note: opt has no family of its own") == 1
    plan = memory_report(override_config(Config(), {"model": str(tmp_path)}))
    assert [line for line in plan.lines() if line.startswith("note: opt has no family of its own")]


def test_a_model_it_gets_wrong_is_refused_when_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fallback.PagedStep.attend

    def wrong(self: Any, module: Any, q: Any, k: Any, v: Any, scale: float, *others: Any) -> Any:
        return real(self, module, q, k, v, scale * 1.2, *others)

    monkeypatch.setattr(fallback.PagedStep, "attend", wrong)
    with pytest.raises(QuireError, match="opt can't run through transformers here: its logits differ by"):
        load(save_opt(tmp_path))


@pytest.mark.parametrize("kind", ["bert", "roformer"])
def test_an_encoder_is_refused_whatever_the_precision(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are known as causal for what they can be told to be. In half precision more than that is let pass."""
    save_checkpoint(Family(kind, lambda: small_config(kind)), tmp_path)
    monkeypatch.setattr(fallback.FallbackModel, "_error", lambda *unused: 0.0)
    refusal = f"{kind} can't run through transformers here: it is not a decoder .*attends to later tokens"
    with pytest.raises(QuireError, match=refusal):
        load(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = save_opt(tmp_path) / "model.safetensors"
    tensors = load_file(path)
    gone = next(name for name in tensors if name.endswith("q_proj.weight"))
    del tensors[gone]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(QuireError, match=f"lacks tensor {gone}"):
        load(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints that call or keep their tensors otherwise than the model does


def save_laguna(folder: Path) -> Any:
    """Experts one by one; in the model they are one tensor, of gates above ups."""
    config = transformers.LagunaConfig(**{**TINY, "pad_token_id": 0}, head_dim=16, num_experts=4, num_experts_per_tok=2,
                                       moe_intermediate_size=96, mlp_layer_types=["sparse"] * 2)  # fmt: skip
    return save_checkpoint(Family("laguna", lambda: config, draw_sharp), folder)


def test_experts_that_lie_one_by_one_are_joined(tmp_path: Path) -> None:
    reference = save_laguna(tmp_path)
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in load_file(tmp_path / "model.safetensors")
    assert_equals_transformers(load(tmp_path).model, reference)


@pytest.mark.parametrize(("change", "words"), [
    ({"experts.2.down_proj": None}, r"lacks expert 2 of model\.layers\.0\.mlp"),
    ({"experts.3.": None}, r"lacks expert 3 of model\.layers\.0\.mlp"),
    ({"up_proj": None}, r"but no mlp\.experts\.\*\.up_proj\.weight beside it"),
    ({"experts.1.up_proj": (95, 64)}, r"experts\.1\.up_proj\.weight in the wrong shape"),
    ({"experts.1.gate_proj": (96, 63)}, r"in the wrong shape"),
    ({"gate_proj": (95, 64), "up_proj": (95, 64)}, r"experts\.gate_up_proj.* in the wrong shape"),
], ids=str)  # fmt: skip
def test_experts_that_do_not_fit_are_named(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    save_laguna(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in list(tensors):
        for part, shape in change.items():
            if ".layers.0.mlp.experts." in name and part in name:
                del tensors[name]
                if shape is not None:
                    tensors[name] = torch.zeros(shape)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(QuireError, match=words) as caught:
        load(tmp_path)
    assert caught.value.code == "bad_weights" and "\n" not in str(caught.value)


def test_names_without_the_body_s_own_are_found(tmp_path: Path) -> None:
    """GPT-2 as it was published: names of the body alone, tables of masks beside them, a token for padding."""
    config = transformers.GPT2Config(**{**TINY, "tie_word_embeddings": True, "pad_token_id": 5})
    reference = save_checkpoint(Family("gpt2", lambda: config), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    older = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    assert "h.0.attn.c_attn.weight" in older
    older["h.0.attn.bias"] = torch.ones(1, 1, 512, 512)
    save_file(older, tmp_path / "model.safetensors", {"format": "pt"})
    assert_equals_transformers(load(tmp_path).model, reference)


def test_matrices_that_lie_below_each_other_are_taken_apart(tmp_path: Path) -> None:
    """HRM-Text: gates, queries, keys and values are one tensor in the file and four in the model."""
    reference = save_checkpoint(Family("hrm_text", lambda: small_config("hrm_text")), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("attn.gqkv_proj.weight"))
    assert_equals_transformers(load(tmp_path).model, reference)
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(QuireError, match=r"gqkv_proj\.weight in the wrong shape: \[255, 64\], which can't become "):
        load(tmp_path)


def test_rows_that_lie_in_turn_are_put_behind_each_other(tmp_path: Path) -> None:
    """Inkling 2: gates and ups take turns in the file, and experts are read one at a time."""
    reference = save_checkpoint(Family("inkling2_text", lambda: small_config("inkling2_text"), draw_sharp), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("mlp.experts.w13_weight"))
    model = load(tmp_path).model
    assert_equals_transformers(model, reference)
    ours = next(weight for of, weight in model.named_parameters() if of.endswith("experts.gate_up_proj"))
    num_rows = ours.shape[1]
    assert torch.equal(tensors[name][:, 1::2], ours[:, num_rows // 2 :]), "ups"


class Chunk:
    def __init__(self, dim: int):
        self.dim, self.num_shards_attribute = dim, None


class Interleave:
    def __init__(self, dim: int, inverse: bool = False):
        self.dim, self.inverse = dim, inverse


class Transpose:
    def __init__(self, dim0: int, dim1: int, check_dims: bool = False):
        self.dim0, self.dim1, self.check_dims = dim0, dim1, check_dims


@pytest.mark.parametrize(("operations", "shape", "expected"), [
    ([Chunk(0)], (6,), [[0, 1, 2], [3, 4, 5]]),
    ([Interleave(0)], (6,), [[0, 2, 4, 1, 3, 5]]),
    ([Interleave(0, True)], (6,), [[0, 3, 1, 4, 2, 5]]),
    ([Interleave(0), Chunk(0)], (6,), [[0, 2, 4], [1, 3, 5]]),
    ([Transpose(0, 1)], (3, 2), [[[0, 2, 4], [1, 3, 5]]]),
    ([Transpose(0, 1, True)], (3, 2), None),
    ([object()], (6,), None),
])  # fmt: skip
def test_what_is_done_to_a_tensor_s_order(operations: list[Any], shape: tuple[int, ...], expected: Any) -> None:
    targets = ["a", "b"][: len(expected or "a")]
    converter = SimpleNamespace(source_patterns=["one"], target_patterns=targets, operations=operations)
    forms = fallback_names._forms_of(converter)
    assert (forms and [form.change(torch.arange(6).view(shape)).tolist() for form in forms]) == expected


@pytest.mark.parametrize(("kind", "model_class"), [
    ("llama4", "Llama4ForConditionalGeneration"), ("minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration"),
])  # fmt: skip
def test_the_language_model_of_one_with_eyes_is_found(kind: str, model_class: str, tmp_path: Path) -> None:
    """They are published in no other way, and by names that only the whole is known to have."""
    reference = save_checkpoint(Family(kind, lambda: small_with_eyes(kind), draw_sharp, model_class), tmp_path)
    with pytest.warns(UserWarning, match="runs as a text-only model"):
        model = load(tmp_path).model
    assert_equals_transformers(model, reference)


def test_a_language_model_that_nobody_knows_is_not() -> None:
    assert language_model_config({"model_type": "odd", "text_config": {"model_type": "odd_text"}}) is None
    assert language_model_config({"model_type": "odd", "text_config": {"vocab_size": 7}}) is None
    assert language_model_config({"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}) is not None


def test_what_would_have_to_be_recomputed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_laguna(tmp_path)
    monkeypatch.setattr(fallback_names, "_join_of", lambda converter: None)
    with pytest.raises(QuireError, match=r"laguna can't run .* need an unsupported conversion of .* \(MergeModulelist"):
        load(tmp_path)


def test_attention_s_output_may_be_viewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values narrower than keys, and a model that takes a view of what attention returns: as if it had no file here."""
    config = transformers.AfmoeConfig(**{**TINY, "pad_token_id": 0}, head_dim=16, sliding_window=9, num_experts=4,
                                      num_experts_per_tok=2, moe_intermediate_size=24)  # fmt: skip
    monkeypatch.delitem(registry.FAMILIES, "afmoe")
    reference = save_checkpoint(Family("afmoe", lambda: config, draw_sharp), tmp_path)
    assert_equals_transformers(load(tmp_path).model, reference)
