"""A running engine's weights, precision and sleep: output equals a fresh start's, and failures change nothing."""

from __future__ import annotations

import gc
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, QuireError, SamplingParams
from quire.types.control import ControlCommand
from tests.cpu.tiny_llm import make_tiny_llm

KNOBS: dict[str, Any] = {"dtype": "float32", "max_model_len": 300, "num_pages": 200, "max_rows": 16, "speculate": "off"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
PROMPTS = [[(7 * i + j * j) % 250 + 5 for j in range(40)] for i in range(16)]


def tokens_of(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two folders of one model with different weights."""
    folder = tmp_path_factory.mktemp("live")
    first = make_tiny_llm(folder / "first")
    shutil.copytree(first, folder / "second")
    path = folder / "second" / "model.safetensors"
    generator = torch.Generator().manual_seed(1)
    changed = {n: t + 0.05 * torch.randn(t.shape, generator=generator) for n, t in load_file(path).items()}
    save_file(changed, path, {"format": "pt"})
    return first, folder / "second"


def fresh(folder: Path, **knobs: Any) -> list[list[int]]:
    with LLM(str(folder), **KNOBS, **knobs) as llm:
        return tokens_of(llm)


def test_other_weights_give_what_a_fresh_start_gives(folders: tuple[Path, Path]) -> None:
    first, second = folders
    want = fresh(first), fresh(second)
    assert want[0] != want[1]
    with LLM(str(first), **KNOBS) as llm:
        assert tokens_of(llm) == want[0]
        done = llm.set_weights(second)
        assert done["paused_seconds"] > 0 and len(bytes.fromhex(done["version"])) >= 16
        hits = llm.engine.scheduler.cache.stats.hit_tokens
        assert tokens_of(llm) == want[1], "warm prefixes of the old weights are not used"
        assert llm.engine.scheduler.cache.stats.hit_tokens == hits
        assert tokens_of(llm) == want[1]
        for _ in range(3):
            llm.set_weights(first)
            llm.set_weights(second)
        llm.set_weights(first)
        assert tokens_of(llm) == want[0]
        llm.engine.scheduler.check()


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "end"])
def test_streams_go_on_or_end_as_asked(folders: tuple[Path, Path], in_flight: str) -> None:
    first, second = folders
    with LLM(str(first), **KNOBS) as llm:
        streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS]
        ended: list[Any] = []
        begun = [next(stream) for stream in streams]
        assert all(chunk.token_ids for chunk in begun)
        llm.set_weights(second, in_flight=in_flight)
        llm.engine.scheduler.check()
        for stream, chunk in zip(streams, begun, strict=True):
            *_, last = [chunk, *stream]
            ended.append(last.output)
        if in_flight == "end":
            assert all(output.error_code == "weights_replaced" for output in ended)
        else:
            assert all(len(output.token_ids) == 32 and output.error is None for output in ended)
        assert tokens_of(llm) == fresh(second)
        llm.engine.scheduler.check()


@pytest.mark.parametrize("quant", ["q8_0", "q4_0"])
def test_precision_goes_there_and_back(folders: tuple[Path, Path], quant: str) -> None:
    first, _ = folders
    want, quantized = fresh(first), fresh(first, quant=quant)
    with LLM(str(first), **KNOBS) as llm:
        assert tokens_of(llm) == want
        for _ in range(3):
            done = llm.set_precision(quant, max_loss=10)
            assert done["loss"] != done["loss_before"]
            assert tokens_of(llm) == quantized
            llm.set_precision("auto", max_loss=10)
            assert tokens_of(llm) == want


def test_what_does_not_fit_changes_nothing(folders: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = folders
    wide = make_tiny_llm(tmp_path / "wide", num_hidden_layers=5)
    lacking = tmp_path / "lacking"
    shutil.copytree(second, lacking)
    tensors = load_file(lacking / "model.safetensors")
    name = next(name for name in tensors if "q_proj" in name)
    save_file({n: t for n, t in tensors.items() if n != name}, lacking / "model.safetensors")
    with LLM(str(first), **KNOBS) as llm:
        want = tokens_of(llm)
        with pytest.raises(QuireError, match="not the model that runs here"):
            llm.set_weights(wide)
        with pytest.raises(QuireError, match="lacks"):
            llm.set_weights(lacking)
        with pytest.raises(QuireError, match="no precision of weights"):
            llm.set_precision("int3")
        with pytest.raises(QuireError, match="nats per token"):
            llm.set_precision("q4_0", max_loss=-100)
        with pytest.raises(QuireError, match="in_flight"):
            llm.set_weights(second, in_flight="forget")
        assert tokens_of(llm) == want
        assert not llm.engine.is_held
        llm.engine.scheduler.check()


@pytest.mark.parametrize("cache", ["keep", "drop"])
def test_a_model_sleeps_and_wakes(folders: tuple[Path, Path], cache: str) -> None:
    first, _ = folders
    with LLM(str(first), **KNOBS) as llm:
        want = tokens_of(llm)
        streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS]
        begun = [next(stream) for stream in streams]
        model = weakref.ref(llm.engine.workers.inner._model)
        llm.sleep(cache=cache)
        gc.collect()
        assert model() is None, "its memory is free"
        with pytest.raises(QuireError, match="sleeps"):
            tokens_of(llm)
        with pytest.raises(QuireError, match="sleeps"):
            llm.set_precision("q8_0")
        held = sum(tensor.untyped_storage().nbytes() for tensor in llm.engine.workers.inner.store.tensors.values())
        assert (held == 0) == (cache == "drop")
        llm.wake()
        outputs = [[chunk, *stream][-1].output for stream, chunk in zip(streams, begun, strict=True)]
        assert [output.token_ids for output in outputs] == want
        assert tokens_of(llm) == want
        llm.engine.scheduler.check()


def test_a_command_that_is_unknown_is_refused(folders: tuple[Path, Path]) -> None:
    with LLM(str(folders[0]), **KNOBS) as llm:
        controls = llm.engine.controls
        controls.start(ControlCommand(5, "wake"))
        controls._actions.pop("weights")
        controls.start(ControlCommand(6, "weights", {"model": "x"}))
        replies = {reply.number: reply for reply in controls.poll()}
        assert replies[5].fields["asleep"] is False and replies[6].code == "unsupported_command"
