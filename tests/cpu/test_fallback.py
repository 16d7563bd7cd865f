"""The fallback through transformers: what it refuses, what it says, and that it notices a model it gets wrong.

That it is right for those it takes is shown in `families/others.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire.files.source import resolve_model
from quire.models import fallback
from quire.models.loader import build_model, load_model
from quire.types import QuireError
from tests.cpu.families.harness import TINY, Family, save_checkpoint

CPU = torch.device("cpu")


def build(config: dict[str, Any], **options: Any) -> Any:
    return build_model(config, dtype="float32", device=CPU, page_tokens=4, **options)[0]


@pytest.mark.parametrize(("config", "words"), [
    ({"model_type": "mamba"}, ("mamba", "keep more than keys and values")),
    ({"model_type": "doge"}, ("doge", "mask")),
    ({"model_type": "falcon", "alibi": True}, ("falcon", "can't run")),
    ({"model_type": "codegen"}, ("codegen", "can't be exchanged")),
    ({"model_type": "bert"}, ("bert", "")),
    ({"model_type": "no_such_model"}, ("no_such_model is not supported", "no causal model of that type")),
    ({"model_type": "opt", "num_hidden_layers": "many"}, ("opt", "refuses this")),
    ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, ("lfm2", "layers of type conv")),
])  # fmt: skip
def test_what_it_can_not_run_is_named(config: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(QuireError) as error:
        build({"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, **config})
    assert error.value.code in ("unsupported_model", "bad_config")
    assert all(word in str(error.value) for word in words), str(error.value)


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(QuireError, match=r"opt is not supported by itself.*pip install"):
        build({"model_type": "opt"})


def test_weights_are_not_quantized_there(monkeypatch: pytest.MonkeyPatch) -> None:
    config = fallback.FallbackModel.read_config({"model_type": "opt"})
    with pytest.raises(QuireError, match="not quantized"):
        fallback.FallbackModel(config, dtype=torch.float32, cache_dtype=torch.float32, device=CPU, page_tokens=4,
                               ops=None, scheme=object())  # type: ignore[arg-type]  # fmt: skip


def save_opt(folder: Path) -> Path:
    config = transformers.OPTConfig(**TINY, ffn_dim=96, word_embed_proj_dim=64)
    save_checkpoint(Family("opt", lambda: config), folder)
    return folder


class Notes:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def start(self, what: str, total: int, done: int = 0) -> None: ...

    def update(self, done: int) -> None: ...

    def finish(self) -> None: ...

    def note(self, line: str) -> None:
        self.lines.append(line)


def load(folder: Path, progress: Any = None) -> Any:
    files = resolve_model(str(folder))
    return load_model(files, dtype="float32", device=CPU, max_model_len=None, page_tokens=4, progress=progress)


def test_it_says_so_at_start(tmp_path: Path) -> None:
    notes = Notes()
    load(save_opt(tmp_path), notes)
    assert notes.lines == ["opt has no file of its own: it runs through transformers, right but slower."]
    with pytest.warns(UserWarning, match="opt has no file of its own"):
        load(tmp_path)


def test_a_model_it_gets_wrong_is_refused_when_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fallback.PagedStep.attend

    def wrong(self: Any, module: Any, q: Any, k: Any, v: Any, scale: float, *others: Any) -> Any:
        return real(self, module, q, k, v, scale * 1.2, *others)

    monkeypatch.setattr(fallback.PagedStep, "attend", wrong)
    with pytest.raises(QuireError, match="opt can't run through transformers here: its logits would be off by"):
        load(save_opt(tmp_path), Notes())


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = save_opt(tmp_path) / "model.safetensors"
    tensors = load_file(path)
    gone = next(name for name in tensors if name.endswith("q_proj.weight"))
    del tensors[gone]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(QuireError, match=f"lacks tensor {gone}"):
        load(tmp_path, Notes())
