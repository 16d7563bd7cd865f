"""`quire quantize` from end to end on tiny models: what it writes is what the reader of each format finds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from quire.cli.main import main
from quire.files.source import resolve_model
from quire.kernels.formats.packed_encode import integer_scales, round_integers
from quire.quantize import gptq, run
from quire.quantize.calibration import FloatModel, Inputs, collect
from quire.quantize.page import render, spread_labels
from quire.quantize.parts import Parts
from quire.quantize.recipe import LADDER, choose_types, find_target, type_bits
from quire.quantize.report import Loss, Result, load_float
from quire.quantize.run import QuantOptions, Run
from quire.quantize.source import TensorFacts
from quire.runtime.reading import read_stretch
from quire.types import QuireError
from tests.cpu.families.harness import draw_wide

VOCAB = 96
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**TINY),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **TINY, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
    ),
    "lfm2": lambda: transformers.Lfm2Config(**TINY, full_attn_idxs=[1], block_multiple_of=32),
}
TOKENS = [(7 * place + place * place) % (VOCAB - 3) + 3 for place in range(40)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random checkpoint of each kind."""
    found = {}
    for name, config in CONFIGS.items():
        model = transformers.AutoModelForCausalLM.from_config(config())
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                draw_wide(key, parameter, generator)
        found[name] = tmp_path_factory.mktemp("models") / name
        model.save_pretrained(found[name])
    return found


def quantize(model: Path, to: str, out: Path, **options: Any) -> dict[str, str]:
    return Run(resolve_model(str(model))).quantize(QuantOptions(find_target(to), out, **options))


def logits(model: Path) -> Tensor:
    loaded = load_float(resolve_model(str(model)))
    with torch.inference_mode():
        return loaded.logits(read_stretch(loaded, TOKENS)).float()[:, :VOCAB]


def loss(one: Tensor, other: Tensor) -> float:
    """Returns the KL divergence of one's distributions from the other's."""
    want, got = one.log_softmax(-1), other.log_softmax(-1)
    return float((want.exp() * (want - got)).sum(-1).mean())


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_gguf_file_has_the_models_logits(folders: dict[str, Path], kind: str, tmp_path: Path) -> None:
    wanted = logits(folders[kind])
    quantize(folders[kind], "F16", tmp_path / "f16.gguf")
    torch.testing.assert_close(logits(tmp_path / "f16.gguf"), wanted, rtol=0.05, atol=0.05)
    quantize(folders[kind], "Q8_0", tmp_path / "q8.gguf")
    types = quantize(folders[kind], "Q4_K_M", tmp_path / "q4.gguf")
    assert {"Q5_0", "Q4_K"} & set(types.values()), types
    eight, four = loss(wanted, logits(tmp_path / "q8.gguf")), loss(wanted, logits(tmp_path / "q4.gguf"))
    assert 0 < eight < four < 1
    # And from one GGUF file to another the same bytes come out as from the folder that it was made of.
    quantize(folders[kind], "F16", tmp_path / "again.gguf")
    assert (tmp_path / "f16.gguf").read_bytes() == (tmp_path / "again.gguf").read_bytes()
    quantize(tmp_path / "f16.gguf", "Q8_0", tmp_path / "from_gguf.gguf")
    assert loss(logits(tmp_path / "q8.gguf"), logits(tmp_path / "from_gguf.gguf")) < 0.3 * eight


COMPRESSED = ("INT8", "W4A16", "FP8", "NVFP4", "MXFP4")


@pytest.mark.parametrize("to", COMPRESSED)
@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_transformers_reads_the_same_weights(folders: dict[str, Path], kind: str, to: str, tmp_path: Path) -> None:
    quantize(folders[kind], to, tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group.pop("input_activations", None)  # both sides shall round the weights alone
    (tmp_path / "out/config.json").write_text(json.dumps(config))
    dtype = torch.bfloat16 if "FP4" in to else torch.float32  # its decoder of four-bit floats knows bfloat16 alone
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    with torch.no_grad():
        want = theirs(torch.tensor([TOKENS])).logits[0].float()
    got = logits(tmp_path / "out")
    lost = loss(logits(folders[kind]), got)
    assert loss(want, got) < (0.1 * lost if "FP4" in to else 1e-6), "of what quantizing costs"


def test_the_experts_of_a_mixture_are_packed_one_by_one(folders: dict[str, Path], tmp_path: Path) -> None:
    """transformers can't read quantized experts, so the library of the format decodes them here."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from safetensors.torch import load_file

    quantize(folders["qwen3_moe"], "W4A16", tmp_path / "out")
    stored = load_file(tmp_path / "out/model.safetensors")
    name = "model.layers.1.mlp.experts.3.down_proj"
    numbers = unpack_from_int32(stored[f"{name}.weight_packed"], 4, torch.Size(stored[f"{name}.weight_shape"].tolist()))
    scales = stored[f"{name}.weight_scale"].float()
    decoded = numbers.float() * scales.repeat_interleave(numbers.shape[1] // scales.shape[1], 1)
    source = run.SourceModel(resolve_model(str(tmp_path / "out")))
    assert torch.equal(source.read(f"{name}.weight"), decoded)
    assert loss(logits(folders["qwen3_moe"]), logits(tmp_path / "out")) < 2


# ---------------------------------------------------------------------------------------------------------------------
# Methods


def test_gptq_loses_less_than_rounding_to_nearest() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(512, 64, generator=generator) @ torch.randn(64, 64, generator=generator)
    matrix = torch.randn(48, 64, generator=generator)
    products = x.t() @ x / len(x)
    numbers, scales = gptq.round_matrix(matrix, products, 32)
    nearest = integer_scales(matrix, 4, 32, products.diag()).bfloat16().float()
    plain = round_integers(matrix, nearest, 4).float() * nearest.repeat_interleave(32, 1)
    careful = numbers.float() * scales.repeat_interleave(32, 1)
    assert torch.equal(scales, nearest), "only the rounding differs"

    def error(decoded: Tensor) -> float:
        return float(((decoded - matrix) @ x.t()).square().mean())

    assert error(careful) < 0.6 * error(plain)
    assert int(numbers.max()) <= 7 and int(numbers.min()) >= -8


def test_gptq_survives_columns_that_nothing_reaches() -> None:
    products = torch.zeros(32, 32)
    products[0, 0] = 1.0
    numbers, scales = gptq.round_matrix(torch.linspace(-1, 1, 64).view(2, 32), products, 32)
    assert torch.isfinite(scales).all() and numbers.abs().max() > 3


def calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token ids in place of a text: the tiny models have no tokenizer."""
    generator = torch.Generator().manual_seed(9)
    stretches = [torch.randint(3, VOCAB, (64,), generator=generator).tolist() for _ in range(16)]
    monkeypatch.setattr(Run, "_stretches", lambda self, path: stretches)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_methods_end_to_end(
    folders: dict[str, Path], method: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model some of whose channels are much larger than others, as those of trained models are."""
    calibrated(monkeypatch)
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "layernorm" in name:
            parameter.data[::16] *= 12
    model.save_pretrained(tmp_path / "model")
    quantize(tmp_path / "model", "W4A16", tmp_path / "plain")
    quantize(tmp_path / "model", "W4A16", tmp_path / "careful", method=method)
    wanted = logits(tmp_path / "model")
    plain, careful = loss(wanted, logits(tmp_path / "plain")), loss(wanted, logits(tmp_path / "careful"))
    assert careful < plain, (careful, plain)


def test_inputs_are_those_of_each_matrix(folders: dict[str, Path]) -> None:
    """Against hooks in front of the linear layers of transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=torch.float32)
    seen: dict[str, Inputs] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "layers" in name:
            found = seen[f"{name}.weight"] = Inputs(torch.zeros(module.in_features))
            module.register_forward_pre_hook(lambda module, args, found=found: found.add(args[0]))
    with torch.no_grad():
        model(torch.tensor([TOKENS]))
    ours = collect(FloatModel.load(resolve_model(str(folders["llama"]))), [TOKENS])
    assert set(seen) <= set(ours)
    for name, found in seen.items():
        torch.testing.assert_close(ours[name].mean_squares, found.mean_squares, rtol=1e-4, atol=1e-5)


def test_experts_get_the_importance_of_their_mixture(folders: dict[str, Path]) -> None:
    ours = collect(FloatModel.load(resolve_model(str(folders["qwen3_moe"]))), [TOKENS])
    first, last = (ours[f"model.layers.0.mlp.experts.{name}_proj.weight"] for name in ("0.gate", "3.up"))
    assert first is last and first.num_tokens == len(TOKENS) and bool((first.squares > 0).all())
    assert "model.layers.0.mlp.experts.2.down_proj.weight" not in ours


# ---------------------------------------------------------------------------------------------------------------------
# Recipes


def test_a_size_in_bits_is_met_and_spent_where_it_matters() -> None:
    tensors = [TensorFacts(f"model.layers.{i}.mlp.down_proj.weight", (8, 256), "linear", i, 4) for i in range(4)]
    costs = {kind: 2.0 ** -type_bits(kind) for kind in LADDER}
    chosen = choose_types(tensors, 5.2, lambda t, kind: costs[kind] * (100 if t.layer == 2 else 1), "Q6_K")
    assert sum(type_bits(kind) for kind in chosen.values()) / 4 <= 5.2
    assert type_bits(chosen[tensors[2].name]) > max(type_bits(chosen[t.name]) for t in tensors if t.layer != 2)
    with pytest.raises(QuireError, match="too few"):
        choose_types(tensors, 4.0, lambda t, kind: 1.0, "Q6_K")


def test_keep_overrides_the_type_of_some(folders: dict[str, Path], tmp_path: Path) -> None:
    types = quantize(folders["llama"], "Q4_0", tmp_path / "a.gguf", keep=(r"layers\.0\..*q_proj=Q8_0",))
    assert types["blk.0.attn_q.weight"] == "Q8_0" and types["blk.1.attn_q.weight"] == "Q4_0"
    folder = tmp_path / "folder"
    quantize(folders["llama"], "W4A16", folder, keep=("down_proj=INT8", r"layers\.1\..*o_proj=BF16"))
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision" and "model.layers.1.self_attn.o_proj" in config["ignore"]
    assert loss(logits(folders["llama"]), logits(folder)) < 2


def test_the_page_shows_every_result_and_no_label_on_another() -> None:
    losses = [Loss(10.0, 9.0, kl, 0.9, 100) for kl in (0.001, 0.04, 0.041, 0.0405, 0.0)]
    results = [Result(f"type {i}", (100 + i) * 10**6, 5.0, loss, [0.1, 0.2]) for i, loss in enumerate(losses)]
    page = render("a <model>", results)
    assert all(page.count(f">type {i}<") == 2 for i in range(5)) and "a &lt;model&gt;" in page
    heights = sorted(spread_labels([(10.0, 50.0), (12.0, 51.0), (14.0, 50.5), (500.0, 50.0)]))
    assert heights[:2] == [50.0, 50.0] and all(b - a >= 11 for a, b in pairwise(heights[1:]))


# ---------------------------------------------------------------------------------------------------------------------
# Interruptions and bad input


@pytest.mark.parametrize("to", ["Q4_0", "INT8"])
def test_an_interrupted_run_goes_on_and_writes_the_same_bytes(
    folders: dict[str, Path], to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(folders["llama"], to, tmp_path / "whole")
    keep, seen = Parts.keep, []

    def interrupt(self: Parts, name: str, make: Any) -> Path:
        seen.append(name)
        if len(seen) == 9:
            raise KeyboardInterrupt
        return keep(self, name, make)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Parts, "keep", interrupt)
        quantize(folders["llama"], to, tmp_path / "torn")
    assert not (tmp_path / "torn").exists()
    made: list[Parts] = []
    monkeypatch.setattr(Parts, "remove", lambda self: (made.append(self), shutil.rmtree(self.folder)))
    quantize(folders["llama"], to, tmp_path / "torn")
    assert made[0].num_kept >= 8
    files = ["."] if (tmp_path / "whole").is_file() else ["model.safetensors", "config.json"]
    for name in files:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "torn" / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["torn", "whole"]


def test_parts_of_other_options_are_not_taken_up(tmp_path: Path) -> None:
    first = Parts(tmp_path / "out", {"target": "Q4_0"})
    first.keep("a", lambda: {"data": torch.ones(3)})
    assert not list(Parts(tmp_path / "out", {"target": "Q8_0"}).folder.glob("*.safetensors"))


def test_a_full_disk_leaves_no_result(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("quire.quantize.compressed_output.save_file", full)
    with pytest.raises(QuireError, match="No space left") as error:
        quantize(folders["llama"], "INT8", tmp_path / "out")
    assert "goes on where it stopped" in error.value.hint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parts"]


BAD = {
    "unknown type": (["--to", "Q9_9", "--out", "OUT"], "no type 'Q9_9'"),
    "no path": (["--to", "Q8_0"], "no path"),
    "no type": (["--out", "OUT"], "no type to quantize to"),
    "path exists": (["--to", "Q8_0", "--out", "."], "exists already"),
    "no folder": (["--to", "Q8_0", "--out", "nowhere/x/out"], "is not a folder"),
    "method": (["--to", "Q8_0", "--method", "gptq", "--out", "OUT"], "four-bit integers only"),
    "bits": (["--to", "INT8", "--target-bpw", "5", "--out", "OUT"], "chooses among GGUF types"),
    "keep pattern": (["--to", "Q8_0", "--keep", "nothing=Q4_0", "--out", "OUT"], "matches none"),
    "keep type": (["--to", "Q8_0", "--keep", "q_proj=Q9", "--out", "OUT"], "does not name"),
    "keep regex": (["--to", "Q8_0", "--keep", "(=Q4_0", "--out", "OUT"], "regular expression"),
    "blocks": (["--to", "Q8_0", "--keep", "q_proj=Q4_K", "--out", "OUT"], "whole blocks of Q4_K"),
    "imatrix": (["--to", "Q8_0", "--imatrix", "missing.txt", "--out", "OUT"], "can't be read"),
    "compare": (["--to", "Q8_0", "--compare", "Q8_0"], "writes no result"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(
    folders: dict[str, Path], case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    words, said = BAD[case]
    assert main(["quantize", str(folders["llama"]), "--no-report", *words]) in (1, 2)
    errors = capsys.readouterr().err.strip().splitlines()
    assert said in errors[-1] and errors[-1].startswith("quire: error:")
    assert not (tmp_path / "OUT").exists()


def test_a_quantized_source_is_refused_unless_told(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    quantize(folders["llama"], "Q8_0", tmp_path / "a.gguf")
    words = ["quantize", str(tmp_path / "a.gguf"), "--to", "Q4_0", "--out", str(tmp_path / "b.gguf"), "--no-report"]
    assert main(words) == 2
    assert "quantized already (Q8_0)" in capsys.readouterr().err
    assert main([*words, "--requantize"]) == 0 and (tmp_path / "b.gguf").exists()
    quantize(folders["llama"], "INT8", tmp_path / "c")
    assert main(["quantize", str(tmp_path / "c"), "--to", "Q4_0", "--out", str(tmp_path / "d.gguf")]) == 2
