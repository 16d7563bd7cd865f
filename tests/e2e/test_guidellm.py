"""guidellm, a load generator many people measure servers with, completes a sweep. It holds other versions of packages
back, so it lives in an environment of its own: `GUIDELLM` names its program."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Started, need, start

PROGRAM = os.environ.get("GUIDELLM") or shutil.which("guidellm")
SWEEP = 3  # one request at a time, as many as fit, and one rate in between
SECONDS = 20  # each; on two cores the hundreds that are sent at once in the second need five for their first answers


@pytest.fixture(scope="module")
def program() -> str:
    if PROGRAM is None:
        pytest.skip("guidellm is not here: make it an environment (`python -m venv v; v/bin/pip install guidellm`) and "
                    "set GUIDELLM=v/bin/guidellm")  # fmt: skip
    return PROGRAM


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It makes its prompts with a tokenizer of its own; any will do."""
    need("tokenizers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tokenizer")
    words = {word: place for place, word in enumerate(["<unk>", *(f"w{i}" for i in range(400)), *"abcdefghijklmnop"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def server(model_here: None) -> Iterator[Started]:
    """The built-in model, without a key: guidellm has no word for one."""
    started = start([sys.executable, "-m", "quire", "serve", "smollm2", "--port", "0", "--max-model-len", "1024",
                     "--cache-memory", "400MiB"])  # fmt: skip
    yield started
    started.stop()


@pytest.mark.slow
def test_a_sweep(program: str, tokenizer: Path, server: Started, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [program, "run", "--backend", f"kind=openai_http,target={server.url}",
               "--profile", f"kind=sweep,sweep_size={SWEEP}", "--constraint", f"kind=max_duration,seconds={SECONDS}",
               "--tokenizer", f"kind=hf_auto,model={tokenizer}",
               "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
               "--output", f"kind=json,path={report}", "--disable-progress"]  # fmt: skip
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    env.pop("PYTHONPATH", None)  # its own packages, not ours
    done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=400, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    benchmarks: list[dict[str, Any]] = json.loads(report.read_text())["benchmarks"]
    assert len(benchmarks) == SWEEP
    for one in benchmarks:
        totals = one["metrics"]["request_totals"]
        print(json.dumps(totals))
        assert totals["successful"] > 0 and totals["errored"] == 0, totals
    assert " 5" not in {line.split("status=")[1][:2] for line in server.lines if "status=" in line}
