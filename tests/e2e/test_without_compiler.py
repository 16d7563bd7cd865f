"""The package installed where there is no C++ compiler: that works, it says what is missing, and it runs on torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.cpu.test_bench_offline import CONFIG, KNOBS

ROOT = Path(__file__).parents[2]
GENERATE = """
import json, sys
import quire
from quire import LLM, SamplingParams
llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
outputs = llm.generate([[1, 2, 3, 4], [5, 6, 7]], params)
print(json.dumps({"tokens": [list(output.token_ids) for output in outputs], "from": quire.__file__}))
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the package installed from a copy of the sources, no compiler within reach."""
    folder = tmp_path_factory.mktemp("bare")
    leave_out = shutil.ignore_patterns("*.so", "*.egg-info", "build", ".git", "__pycache__", "tests", ".*_cache")
    shutil.copytree(ROOT, folder / "source", ignore=leave_out)
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    packages = next((folder / "venv/lib").glob("python*/site-packages"))
    (packages / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"])  # torch and all else we need
    done = _run(folder, "-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed",
                str(folder / "source"))  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(packages.glob("quire/kernels/native/*.so")), "there was a compiler after all"
    shipped, ours = packages / "quire/kernels/native/src", ROOT / "quire/kernels/native/src"
    assert {path.relative_to(shipped) for path in shipped.rglob("*.*")} == {
        path.relative_to(ours) for path in ours.rglob("*.*")
    }, "a later build finds its sources"
    return folder


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    hidden = ("PATH", "CXX", "CC", "PYTHONPATH")
    env = {name: value for name, value in os.environ.items() if name not in hidden and not name.startswith("QUIRE_")}
    env |= {"PATH": str(folder / "venv/bin"), "CXX": "false"}
    return subprocess.run([str(folder / "venv/bin/python"), *arguments], cwd=folder, env=env, capture_output=True,
                          text=True)  # fmt: skip


@pytest.mark.slow
def test_the_doctor_says_what_is_missing(bare: Path) -> None:
    done = _run(bare, "-m", "quire", "doctor", "--json")
    report = json.loads(done.stdout)
    assert report["cpu_kernels"]["isa"] is None
    (missing,) = (item for item in report["missing"] if "CPU kernels" in item["what"])
    assert "C++ compiler" in missing["how"] and not missing["required"]


@pytest.mark.slow
def test_models_run_on_torch(bare: Path) -> None:
    (bare / "model").mkdir()
    (bare / "model" / "config.json").write_text(json.dumps(CONFIG))
    done = _run(bare, "-c", GENERATE, "model", json.dumps(KNOBS))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert str(bare) in told["from"] and [len(tokens) for tokens in told["tokens"]] == [8, 8]
    refused = _run(bare, "-c", GENERATE, "model", json.dumps({**KNOBS, "quant": "q4_0"}))
    assert "native kernels" in refused.stderr and "quire doctor" in refused.stderr
    asked = _run(bare, "-m", "quire", "run", "--model", "model", "--kernels", "avx2", "--random-weights", "Hello")
    assert asked.returncode and "C++ compiler" in asked.stderr
