"""Checkpoints as tools publish them quantized: what is loaded is what their numbers stand for, decoded or, on a CPU
that may choose, in blocks of as few bits; and every fault of such a file or its config is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, SamplingParams
from quire.files.source import resolve_model
from quire.kernels.native.matrix import PackedLinear
from quire.kernels.table import select_ops
from quire.layers.experts import Experts
from quire.layers.linear import Linear
from quire.layers.weights import weights_bytes
from quire.models.loading.loader import build_model, load_model, read_config
from quire.types import QuireError
from tests.cpu.families.decoded import held_bytes
from tests.cpu.families.harness import save_checkpoint
from tests.cpu.packers import FORMATS, Format, pack_folder, say
from tests.cpu.test_packed_tensors import CPU, TOKENS, family, load, logits_of

BY_BFLOAT16 = 0.02  # where the library decodes to bfloat16
LAYER = "model.layers.1.mlp.up_proj"
needs_native = pytest.mark.skipif(select_ops("cpu").native is None, reason="the native library is not built")


def form_of(name: str) -> Format:
    return next(form for form in FORMATS if form.name == name)


def packed_and_decoded(name: str, form: Format, tmp_path: Path) -> tuple[Path, Path]:
    """A family's folder in this format, and one of the floats that it stands for."""
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    save_checkpoint(family(name), packed)
    save_checkpoint(family(name), plain)
    decoded = pack_folder(packed, form)
    save_file({key: value.contiguous() for key, value in decoded.items()}, plain / "model.safetensors")
    return packed, plain


def off_by(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.filterwarnings("ignore:.*decoded to float32")
def test_it_is_what_its_numbers_stand_for(form: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in pieces that end within whatever shares a scale or a word."""
    monkeypatch.setattr("quire.models.loading.shards.READ_ELEMENTS", 700)
    packed, plain = packed_and_decoded("llama", form, tmp_path)
    got, want = (logits_of(load(folder).model) for folder in (packed, plain))
    assert off_by(got, want) < 1e-5
    save_checkpoint(family("llama"), tmp_path / "unpacked")
    assert off_by(logits_of(load(tmp_path / "unpacked").model), want) > 1e-3, "or nothing was packed"


@pytest.mark.parametrize(("name", "most"), [
    ("words", BY_BFLOAT16), ("words with zeros", BY_BFLOAT16), ("words of 8 bits", BY_BFLOAT16), ("bytes", 1e-5),
    ("bytes with zeros", 1e-5), ("fp8 by row", 1e-5), ("fp8 by block", 1e-5), ("mxfp8", 1e-5), ("nvfp4", BY_BFLOAT16),
    ("mxfp4", 1e-5),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*")
def test_it_is_what_the_formats_own_library_decodes(name: str, most: float, tmp_path: Path) -> None:
    save_checkpoint(family("llama"), tmp_path)
    form = form_of(name)
    pack_folder(tmp_path, form)
    group = form.config["config_groups"]["group_0"]
    weights = {"strategy": "channel", **group["weights"]}
    if weights.get("group_size"):
        weights["strategy"] = "tensor_group" if name == "nvfp4" else "group"
    inputs = None
    if name.startswith(("bytes", "fp8")):  # by which it tells these from words
        inputs = {"num_bits": 8, "type": weights["type"], "dynamic": True, "strategy": "token", "symmetric": True}
    group = {**group, "weights": weights, "input_activations": inputs}
    say(tmp_path, {**form.config, "config_groups": {"group_0": group}, "quantization_status": "compressed"})
    decoded = transformers.CompressedTensorsConfig(run_compressed=False)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", quantization_config=decoded
    )
    with torch.inference_mode():
        want = reference(torch.tensor([TOKENS])).logits[0]
    assert off_by(logits_of(load(tmp_path).model), want) < most


@needs_native
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_cpu_keeps_it_in_blocks(form: Format, tmp_path: Path) -> None:
    """Exactly, where a type of block can hold the same numbers."""
    save_checkpoint(family("llama"), tmp_path)
    decoded = pack_folder(tmp_path, form)
    model = load(tmp_path, dtype="auto").model
    linear = model.get_submodule("layers.1.mlp.gate_up")
    assert isinstance(linear, Linear) and isinstance(linear.packed, PackedLinear)
    for name, part in zip(("gate_proj", "up_proj"), linear.packed.parts, strict=True):
        assert part.form == form.kept
        got, want = part.rows(torch.arange(96)), decoded[f"model.layers.1.mlp.{name}.weight"]
        largest = want.view(96, 2, 32).abs().amax(2, keepdim=True)
        assert ((got - want).view(96, 2, 32).abs() <= form.loss * largest + 1e-12).all()
    assert logits_of(model).isfinite().all()


@needs_native
@pytest.mark.parametrize("name", ["gptq", "awq", "nvfp4"])
def test_the_plan_knows_what_it_takes(name: str, tmp_path: Path) -> None:
    save_checkpoint(family("llama"), tmp_path)
    pack_folder(tmp_path, form_of(name))
    planned, _ = build_model(read_config(resolve_model(str(tmp_path))), dtype="auto", device=CPU, page_tokens=16)
    loaded = load(tmp_path, dtype="auto")
    assert weights_bytes(planned) == loaded.weights_bytes == held_bytes(loaded.model)


@pytest.mark.parametrize(("name", "form"), [
    ("qwen3_moe", "gptq"), ("mixtral", "words"), ("qwen3_next", "words"), ("deepseek_v3", "gptq in 8 bits"),
    ("phi3", "gptq"), ("nemotron_h", "mxfp4"), ("gemma3 of text and images", "gptq"), ("apertus", "gptq"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*")
def test_families_of_every_kind(name: str, form: str, tmp_path: Path) -> None:
    packed, plain = packed_and_decoded(name, form_of(form), tmp_path)
    want = logits_of(load(plain).model)
    assert off_by(logits_of(load(packed).model), want) < 1e-5
    kept, floats = load(packed, dtype="auto").model, load(plain).model
    for (name, one), (_, other) in zip(matrices_of(kept), matrices_of(floats), strict=True):
        assert off_by(one, other) < 1e-6, name
    assert logits_of(kept).isfinite().all()


def matrices_of(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every product's weight as floats, whatever it is kept as."""
    for name, module in model.named_modules():
        owned: list[Any] = [module.gate_up, module.down] if isinstance(module, Experts) else []
        if isinstance(module, Linear):
            packed = getattr(module, "packed", None)
            owned = [module.weight if packed is None else packed.parts]
        for matrix in owned:
            is_packed = isinstance(matrix, list)
            yield name, torch.cat([part.rows(torch.arange(part.shape[0])) for part in matrix]) if is_packed else matrix


@pytest.mark.filterwarnings("ignore:.*")
def test_it_answers_through_the_engine(tmp_path: Path) -> None:
    packed, plain = packed_and_decoded("llama", form_of("gptq"), tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    tokens = []
    for folder in (packed, plain):
        with LLM(str(folder), dtype="float32", device="cpu", max_model_len=128) as llm:
            tokens.append([output.token_ids for output in llm.generate([TOKENS[:9], TOKENS[:30]], params)])
    assert tokens[0] == tokens[1]


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.filterwarnings("ignore:.*decoded to float32")
def test_a_bias_that_adds_nothing(tmp_path: Path) -> None:
    """GPTQ's first tool wrote one for every layer, also where a model has none."""
    save_checkpoint(family("llama"), tmp_path)
    pack_folder(tmp_path, form_of("gptq"))
    want = logits_of(load(tmp_path).model)
    edit(tmp_path, lambda tensors: tensors.update({f"{LAYER}.bias": torch.zeros(96)}))
    assert torch.equal(logits_of(load(tmp_path).model), want)
    edit(tmp_path, lambda tensors: tensors.update({f"{LAYER}.bias": torch.full((96,), 0.5)}))
    with pytest.raises(QuireError, match=f"{LAYER}.bias, which this model does not have"):
        load(tmp_path)


@pytest.mark.filterwarnings("ignore:.*decoded to float32")
def test_either_way_of_writing_even_zeros(tmp_path: Path) -> None:
    """Whoever says that all zeros are in the middle is believed, whichever form he claims."""
    save_checkpoint(family("llama"), tmp_path)
    pack_folder(tmp_path, form_of("gptq"))
    want = logits_of(load(tmp_path).model)
    say(tmp_path, {**form_of("gptq").config, "checkpoint_format": "gptq_v2"})
    assert torch.equal(logits_of(load(tmp_path).model), want)


def cut(end: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({f"{LAYER}.{end}": tensors[f"{LAYER}.{end}"][:-1].clone()})


def drop(end: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(f"{LAYER}.{end}")


def put(end: str, value: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({f"{LAYER}.{end}": value})


STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(("form", "change", "words"), [
    ("gptq", drop("scales"), (f"{LAYER}.scales is missing",)),
    ("gptq", drop("qzeros"), (f"{LAYER}.qzeros is missing",)),
    ("gptq", cut("scales"), (f"{LAYER}.qzeros is I32 [2, 12]", "[1, 12]")),
    ("gptq", cut("qzeros"), (f"{LAYER}.qzeros is I32 [1, 12]", "[2, 12]")),
    ("gptq", cut("qweight"), (f"{LAYER}.qweight is [7, 96]", "2, 3, 4 or 8 bits")),
    ("gptq", put("g_idx", torch.arange(64).int() % 2), (f"{LAYER}.g_idx", "desc_act")),
    ("gptq out of order", put("g_idx", torch.full((64,), 99).int()), (f"{LAYER}.g_idx refers to groups",)),
    ("gptq", put("qzeros", torch.zeros(2, 12).int()), (f"{LAYER}.qzeros has zero points other than 8", "sym")),
    ("gptq", put("weight", torch.zeros(96, 64)), (f"{LAYER}.weight both packed and unpacked",)),
    ("awq", drop("scales"), (f"{LAYER}.scales is missing",)),
    ("awq", cut("qzeros"), (f"{LAYER}.qzeros",)),
    ("awq", cut("qweight"), (f"{LAYER}.weight", "[96, 63]", "[96, 64]")),
    ("words", drop("weight_scale"), (f"{LAYER}.weight_scale is missing",)),
    ("words", cut("weight_scale"), (f"{LAYER}.weight_scale is BF16 [95, 2]", "[96, 2]")),
    ("words with zeros", drop("weight_zero_point"), (f"{LAYER}.weight_zero_point is missing",)),
    ("bytes", cut("weight_scale"), (f"{LAYER}.weight_scale is [95, 1]",)),
    ("fp8 by row", cut("weight_scale"), (f"{LAYER}.weight_scale is F32 [95, 1]", "one scale for each matrix or row")),
    ("nvfp4", cut("weight_scale"), (f"{LAYER}.weight_scale is F8_E4M3 [95, 4]", "[96, 4]")),
    ("nvfp4", drop("weight_global_scale"), (f"{LAYER}.weight_scale", "F8_E8M0 or U8")),
    ("nf4", drop("weight.absmax"), (f"{LAYER}.weight.absmax is missing",)),
    ("nf4", put(STATE, torch.tensor(list(b"{"), dtype=torch.uint8)), (STATE, "JSON")),
    ("nf4", put(STATE, torch.tensor(list(b'{"shape": [3]}'), dtype=torch.uint8)), (STATE, "a valid shape")),
    ("llm.int8", drop("SCB"), (f"{LAYER}.SCB is missing",)),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*decoded to float32")
def test_a_file_with_a_fault(form: str, change: Callable[[dict[str, Tensor]], object], words: tuple[str, ...],
                             tmp_path: Path) -> None:  # fmt: skip
    save_checkpoint(family("llama"), tmp_path)
    pack_folder(tmp_path, form_of(form))
    edit(tmp_path, change)
    with pytest.raises(QuireError) as error:
        load(tmp_path)
    assert error.value.code == "bad_weights" and all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)


GPTQ, AWQ, WORDS = (form_of(name).config for name in ("gptq", "awq", "words"))
GROUP = WORDS["config_groups"]["group_0"]


@pytest.mark.parametrize(("config", "code", "words"), [
    ({**GPTQ, "checkpoint_format": "marlin"}, "unsupported_model", "the GPTQ format 'marlin'"),
    ({**GPTQ, "group_size": 0}, "bad_config", "group_size"), ({**GPTQ, "bits": "four"}, "bad_config", "bits"),
    ({**GPTQ, "checkpoint_format": ["gptq"]}, "unsupported_model", "the GPTQ format"),
    ({**GPTQ, "bits": -1}, "bad_config", "bits"),
    ({**AWQ, "version": "gemv"}, "unsupported_model", "AWQ's version 'gemv'"),
    ({**AWQ, "bits": 3}, "unsupported_model", "AWQ with 3 bits"),
    ({**WORDS, "format": "marlin-24"}, "unsupported_model", "marlin-24"),
    ({**WORDS, "sparsity_config": {"format": "sparse-24-bitmask"}}, "unsupported_model", "sparsity_config"),
    ({**WORDS, "transform_config": {"config_groups": {"u": {}}}}, "unsupported_model", "transform_config"),
    ({**WORDS, "config_groups": {}}, "bad_config", "config_groups"),
    ({**WORDS, "config_groups": {"a": {**GROUP, "targets": "Linear"}}}, "bad_config", "targets"),
    ({**WORDS, "config_groups": {"a": {**GROUP, "targets": ["re:("]}}}, "bad_config", "regular expression"),
    ({**WORDS, "config_groups": {"a": {**GROUP, "targets": ["re:.*down"]}}}, "bad_weights", "no group of config.json"),
    ({**WORDS, "config_groups": {"a": {**GROUP, "weights": {"num_bits": 3}}}}, "unsupported_model", "3 bits"),
    ({"quant_method": "quip"}, "unsupported_model", "quip"), ({"quant_method": ["gptq"]}, "unsupported_model", "gptq"),
])  # fmt: skip
def test_a_config_with_a_fault(config: Any, code: str, words: str, tmp_path: Path) -> None:
    save_checkpoint(family("llama"), tmp_path)
    pack_folder(tmp_path, form_of("words"))
    say(tmp_path, config)
    with pytest.raises(QuireError) as error:
        load(tmp_path)
    assert error.value.code == code and words in str(error.value), str(error.value)
    assert "\n" not in str(error.value)


def test_layers_may_have_groups_of_their_own(tmp_path: Path) -> None:
    """Four bits for most, eight for those that a group names."""
    save_checkpoint(family("llama"), tmp_path)
    four, eight = form_of("words"), form_of("words of 8 bits")
    plain = load_file(tmp_path / "model.safetensors")

    def pack(weight: Tensor) -> Any:
        return (eight if weight.shape == (64, 96) else four).pack(weight)

    config = {**four.config, "config_groups": {
        **four.config["config_groups"],
        "group_1": {"targets": ["re:.*down_proj"], "weights": {"num_bits": 8, "symmetric": True}},
    }}  # fmt: skip
    decoded = pack_folder(tmp_path, Format("both", pack, config, ""))
    with pytest.warns(UserWarning, match=r"is quantized \(compressed-tensors\); its weights are decoded to float32"):
        got = logits_of(load(tmp_path).model)
    save_file(decoded, tmp_path / "model.safetensors")
    say(tmp_path, None)
    assert off_by(got, logits_of(load(tmp_path).model)) < 1e-5
    assert not torch.equal(decoded["model.layers.0.mlp.down_proj.weight"], plain["model.layers.0.mlp.down_proj.weight"])


def test_what_config_says_stays_what_counts(tmp_path: Path) -> None:
    """A file that an older tool left behind does not overrule config.json."""
    save_checkpoint(family("llama"), tmp_path)
    pack_folder(tmp_path, form_of("words"))
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4}))
    files = resolve_model(str(tmp_path))
    assert files.config is not None and files.config["quantization_config"]["quant_method"] == "compressed-tensors"


@needs_native
@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_random_weights_in_its_blocks(name: str, tmp_path: Path) -> None:
    save_checkpoint(family("llama"), tmp_path)
    pack_folder(tmp_path, form_of(name))
    model = load(tmp_path, dtype="auto", random_weights=True).model
    for where, matrix in matrices_of(model):
        assert 0.015 < float(matrix.std()) < 0.025, where
    index = {"metadata": {}, "weight_map": {"x": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    files = resolve_model(str(tmp_path), random_weights=True)
    load_model(files, dtype="auto", device=CPU, max_model_len=None, page_tokens=16, random_weights=True)
