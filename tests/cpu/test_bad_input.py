"""Everything a person can get wrong gives one clear line and a non-zero exit, never a traceback."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from tests.cpu.tiny_llm import make_tiny_llm
from tests.cpu.tiny_models import make_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llm(tmp_path_factory.mktemp("good"))


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        code = main(["run", *argv])
    except SystemExit as stop:  # argparse
        code = int(stop.code or 0)
    out = capsys.readouterr()
    return code, out.out, out.err


def one_line(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    code, out, err = run(capsys, *argv)
    assert code not in (0, 70), f"exit code {code}: {err}"
    assert out == "" and "Traceback" not in err
    lines = [line for line in err.splitlines() if not line.startswith("usage:")]
    assert len(lines) == 1, err
    return lines[0]


def copy_of(model: Path, target: Path) -> Path:
    target.mkdir()
    for file in model.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_a_good_model_answers(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    code, out, _ = run(capsys, "why is the sky", "--model", str(model), "--max-tokens", "5", "--json", "--seed", "1")
    answer = json.loads(out)
    assert code == 0 and set(answer) == {"text", "token_ids", "finish_reason", "usage", "timing"}


def test_missing_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert "/nowhere/at/all" in one_line(capsys, "hi", "--model", "/nowhere/at/all")


def test_not_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "config.json" in one_line(capsys, "hi", "--model", str(tmp_path))
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    assert "notes.txt" in one_line(capsys, "hi", "--model", str(text))


def test_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert "smollm2" in one_line(capsys, "hi", "--model", "smolm2", "--offline")


def test_truncated_safetensors(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    broken = copy_of(model, tmp_path / "cut")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert "model.safetensors" in one_line(capsys, "hi", "--model", str(broken))


def test_missing_tensor_is_named(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = copy_of(model, tmp_path / "less")
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors")
    assert "model.layers.1.mlp.up_proj.weight" in one_line(capsys, "hi", "--model", str(broken))


def test_unsupported_architecture(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    broken = copy_of(model, tmp_path / "other")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "model_type": "spiral"}))
    line = one_line(capsys, "hi", "--model", str(broken))
    assert "spiral" in line and "docs/models.md lists all" in line


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "spiral"),
        ({"hidden_act": "spiral"}, "spiral"),
        ({"layer_types": ["full_attention", "spiral"], "num_hidden_layers": 2}, "spiral"),
        ({"num_attention_heads": 7, "head_dim": None}, "7 heads"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
    ],
    ids=str,
)
def test_a_config_that_can_not_be(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, changes: dict[str, Any], word: str
) -> None:
    """`test_models_bad_config` has the same for every model type."""
    broken = copy_of(model, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, **changes}))
    assert word in one_line(capsys, "hi", "--model", str(broken))


def test_a_missing_expert_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_tiny("qwen3_moe", tmp_path)
    capsys.readouterr()
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.experts.5." not in name}
    assert len(tensors) - len(kept) == 3
    save_file(kept, tmp_path / "model.safetensors")
    line = one_line(capsys, "hi", "--raw", "--model", str(tmp_path))
    assert "expert 5" in line and "layers.1" in line


@pytest.mark.parametrize(
    "content",
    [
        b"GGUF",
        b"GGUF" + struct.pack("<I", 3) + b"\xff" * 40,
        b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62) + b"general.architecture",
        b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
    ],
    ids=["truncated", "ones", "counts", "string length", "version"],
)
def test_lying_gguf(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    assert "bad.gguf" in one_line(capsys, "hi", "--model", str(path))


def test_model_too_large(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 200,
              "num_attention_heads": 512, "num_key_value_heads": 64, "vocab_size": 128000}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = one_line(capsys, "hi", "--raw", "--model", str(tmp_path), "--random-weights")
    assert "memory is free" in line and "needs" in line


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (("",), "empty"),
        ((), "no prompt"),
        (("hi", "--max-tokens", "0"), "max_tokens=0"),
        (("hi", "--max-tokens", "-4"), "max_tokens=-4"),
        (("hi", "--temperature", "nan"), "temperature=nan"),
        (("hi", "--temperature", "-1"), "temperature=-1"),
        (("hi", "--top-p", "7"), "top_p=7"),
        (("hi", "--max-tokns", "4"), "--max-tokens"),
        (("hi", "--max-model-len", "0"), "max_model_len"),
        (("hi", "--depth", "99"), "depth"),
        (("hi", "--dtype", "bfloat16"), "bfloat16"),
        (("hi", "--quant", "fp8"), "quant=fp8"),
        (("hi", "--kv-dtype", "fp8"), "kv_dtype=fp8"),
        (("hi", "--device", "cuda"), "CUDA"),
        (("hi", "--trace", "/nowhere/at/all/trace.json"), "trace"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], model: Path, argv: tuple[str, ...], word: str) -> None:
    assert word in one_line(capsys, *argv, "--model", str(model))


def test_prompt_longer_than_the_model(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    line = one_line(capsys, "sky " * 500, "--model", str(model), "--max-model-len", "100")
    assert "limit is 100" in line and "tokens" in line


def test_unknown_toml_key(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    file = tmp_path / "quire.toml"
    file.write_text("[model]\nmax_modellen = 5\n")
    line = one_line(capsys, "hi", "--model", str(model), "--config", str(file))
    assert "max_modellen" in line and "max_model_len" in line and "quire.toml" in line


def test_ctrl_c_ends_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    model = make_tiny_llm(tmp_path, max_position_embeddings=8192, seed=37)  # has to be interrupted: it repeats itself
    command = [sys.executable, "-u", "-m", "quire", "run", "why", "--model", str(model), "--temperature", "0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job may ignore it
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(1), process.stderr.read().decode()  # it is answering
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    _, err = process.communicate(timeout=30)
    print(f"ended after {time.monotonic() - begin:.2f} s")
    assert process.returncode == 130, err
    assert b"Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
