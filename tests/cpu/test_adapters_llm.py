"""Adapters through `LLM`: names, reloads under one name, bad files, quantized bases and GGUF adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire import LLM, QuireError, SamplingParams
from quire.files.adapters import read_adapter
from tests.cpu.lora_folders import adapted, check_greedy, linear_names, save_adapter
from tests.cpu.rig import load_whole, make_engine, make_request
from tests.cpu.tiny_gguf import gguf_name, write_gguf
from tests.cpu.tiny_llm import make_tiny_llm

KNOBS: dict[str, Any] = {"dtype": "float32", "max_model_len": 200, "num_pages": 100, "max_rows": 8}
PROMPT = [5, 9, 17, 33, 65, 8, 7, 6]


def greedy(adapter: str | None = None) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, adapter=adapter)


class Tiny:
    def __init__(self, folder: Path):
        self.folder = make_tiny_llm(folder / "base")
        self.reference: Any = transformers.AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        names = linear_names(self.reference)
        self.loras = {
            name: save_adapter(self.reference, folder / name, names, rank=rank, seed=rank, spread=0.2)
            for name, rank in (("one", 4), ("two", 6))
        }

    def check(self, name: str | None, tokens: list[int]) -> None:
        with adapted(self.reference, None if name is None else self.loras[name]) as model:
            check_greedy(model, PROMPT, tokens)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


def test_requests_choose_adapters_by_name(tiny: Tiny) -> None:
    with LLM(str(tiny.folder), adapters={"one": tiny.loras["one"]}, **KNOBS) as llm:
        llm.load_adapter("two", tiny.loras["two"])
        outputs = llm.generate([PROMPT] * 3, [greedy("one"), greedy(), greedy("two")])
        for name, output in zip(("one", None, "two"), outputs, strict=True):
            tiny.check(name, output.token_ids)
        with pytest.raises(QuireError, match="no adapter 'three'"):
            llm.generate(PROMPT, greedy("three"))
        with pytest.raises(QuireError, match="already"):
            llm.load_adapter("one", tiny.loras["two"])
        llm.unload_adapter("two")
        with pytest.raises(QuireError, match="no adapter 'two'"):
            llm.generate(PROMPT, greedy("two"))


def test_a_setting_names_adapters(tiny: Tiny) -> None:
    with LLM(str(tiny.folder), adapter=f"one={tiny.loras['one']}, two={tiny.loras['two']}", **KNOBS) as llm:
        tiny.check("two", llm.generate(PROMPT, greedy("two"))[0].token_ids)
    with pytest.raises(QuireError, match="name=path"):
        LLM(str(tiny.folder), adapter="one", **KNOBS)


def test_a_reload_under_one_name_shares_nothing(tiny: Tiny) -> None:
    with LLM(str(tiny.folder), adapters={"mine": tiny.loras["one"]}, **KNOBS) as llm:
        first = llm.generate(PROMPT * 4, greedy("mine"))[0]
        llm.load_adapter("mine", tiny.loras["two"], replace=True)
        second = llm.generate(PROMPT * 4, greedy("mine"))[0]
        assert second.usage.cached_tokens == 0 and second.token_ids != first.token_ids
        assert len(llm.engine.scheduler.adapters.known) == 1, "the first one is gone"
        llm.load_adapter("again", tiny.loras["two"])
        assert llm.generate(PROMPT * 4, greedy("again"))[0].usage.cached_tokens > 0, "equal bytes are one adapter"
        llm.engine.scheduler.check()


@pytest.mark.parametrize("quant", ["q8_0", "q4_0"])
def test_a_quantized_base_takes_adapters(tiny: Tiny, quant: str) -> None:
    """The adapter's product is in floats: its change of the logits is that of the float model, up to rounding."""
    knobs = {**KNOBS, "quant": quant}
    with LLM(str(tiny.folder), adapters=tiny.loras, **knobs) as llm:
        outputs = llm.generate([PROMPT] * 3, [greedy(), greedy("one"), greedy("two")])
        tokens = [output.token_ids for output in outputs]
        assert len({tuple(one) for one in tokens}) == 3
        assert llm.generate([PROMPT], greedy("one"))[0].token_ids == tokens[1]


def write_gguf_adapter(tiny: Tiny, name: str, path: Path) -> Path:
    """Writes an adapter as llama.cpp's converter would, with queries and keys permuted."""
    config = tiny.reference.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32(
        "adapter.lora.alpha", json.loads((tiny.loras[name] / "adapter_config.json").read_text())["lora_alpha"]
    )
    for key, tensor in load_file(tiny.loras[name] / "adapter_model.safetensors").items():
        module, _, which = key.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        values = tensor.numpy()
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
        kind = module.rpartition(".")[2]
        if which == "B" and kind in ("q_proj", "k_proj"):
            rows, rank = values.shape
            num = heads[kind[0]]
            values = values.reshape(num, 2, rows // num // 2, rank).swapaxes(1, 2).reshape(rows, rank)
        writer.add_tensor(f"{gguf_name(module + '.weight')}.lora_{which.lower()}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_adapter_equals_the_folder_it_was_made_of(tiny: Tiny, tmp_path: Path) -> None:
    path = write_gguf_adapter(tiny, "one", tmp_path / "one.gguf")
    with LLM(str(tiny.folder), adapters={"one": path}, **KNOBS) as llm:
        tiny.check("one", llm.generate(PROMPT, greedy("one"))[0].token_ids)
    write_gguf(tiny.reference, "llama", tmp_path / "base.gguf")
    loaded = load_whole(tmp_path / "base.gguf", dtype="auto")
    engine = make_engine(loaded.model, places=loaded.places)
    for adapter in (path, tiny.loras["two"]):
        files = read_adapter(adapter)
        engine.adapters.read(files)
        engine.adapters.register(files.digest)
    for name, adapter in (("one", path), ("two", tiny.loras["two"])):
        request = make_request(name, PROMPT, greedy())
        request.adapter = read_adapter(adapter).digest
        engine.add(request)
        engine.run_until_idle()
        tiny.check(name, request.tokens[len(PROMPT) :])


def spoil(tiny: Tiny, folder: Path, tensors: dict[str, Any] | None = None, **config: Any) -> Path:
    shutil.copytree(tiny.loras["one"], folder)
    fields = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**fields, **config}))
    if tensors is not None:
        stored = load_file(folder / "adapter_model.safetensors")
        changed = {name: tensor for name, tensor in {**stored, **tensors}.items() if tensor is not None}
        save_file(changed, folder / "adapter_model.safetensors")
    return folder


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("what", "change", "config"),
    [
        ("DoRA", None, {"use_dora": True}),
        ("type is IA3", None, {"peft_type": "IA3"}),
        ("aLoRA", None, {"alora_invocation_tokens": [1, 2]}),
        ("changes biases", None, {"bias": "all"}),
        ("no valid r", None, {"r": "four"}),
        ("does not fit this model", {KEY: torch.zeros(4, 60)}, {}),
        ("does not fit this model", {KEY.replace("layers.0", "layers.99"): torch.zeros(4, 64)}, {}),
        ("not a finite number", {KEY: torch.full((4, 64), float("nan"))}, {}),
        ("only one of its two", {KEY: None}, {}),
    ],
)
def test_a_bad_adapter_is_one_clear_error(
    tiny: Tiny, tmp_path: Path, what: str, change: dict[str, Any] | None, config: dict[str, Any]
) -> None:
    folder = spoil(tiny, tmp_path / "bad", change, **config)
    with LLM(str(tiny.folder), adapters={"two": tiny.loras["two"]}, **KNOBS) as llm:
        width = tiny.reference.config.hidden_size
        assert width == 64 or change is None
        with pytest.raises(QuireError, match=what) as caught:
            llm.load_adapter("bad", folder)
        assert "\n" not in str(caught.value)
        tiny.check("two", llm.generate(PROMPT, greedy("two"))[0].token_ids)
        assert len(llm.edge.adapters) == len(llm.engine.scheduler.adapters.known) == 1


def test_limits_and_names_are_checked(tiny: Tiny, tmp_path: Path) -> None:
    with LLM(str(tiny.folder), max_adapter_rank=4, **KNOBS) as llm:
        with pytest.raises(QuireError, match=r"rank 6 in .*, 4 is the limit"):
            llm.load_adapter("two", tiny.loras["two"])
        with pytest.raises(QuireError, match="not a usable adapter name"):
            llm.load_adapter("a=b", tiny.loras["one"])
        with pytest.raises(QuireError, match="neither a folder nor a GGUF file"):
            llm.load_adapter("none", tmp_path / "none")
        (tmp_path / "empty").mkdir()
        with pytest.raises(QuireError, match=r"no adapter_config\.json"):
            llm.load_adapter("empty", tmp_path / "empty")
    with LLM(str(tiny.folder), adapter_slots=0, **KNOBS) as llm, pytest.raises(QuireError, match="no slots"):
        llm.load_adapter("one", tiny.loras["one"])
    with pytest.raises(QuireError, match="deterministic"):
        LLM(str(tiny.folder), adapters=tiny.loras, deterministic=True, **KNOBS)
