"""The command as a whole: what it imports, how it refuses, and which exit code each ending has."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from argparse import Namespace
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import quire
from quire.cli.main import COMMANDS, main
from quire.types import QuireError

ROOT = Path(quire.__file__).parent.parent
BUILT = [command for command in COMMANDS if find_spec(f"quire.cli.{command}") is not None]
HEAVY = ("torch", "rich", "jinja2", "tokenizers", "numpy")

Behave = Callable[[Callable[[Namespace], int]], None]


def run_python(*argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    return subprocess.run([sys.executable, *argv], env=env, capture_output=True, text=True, timeout=60, **options)


@pytest.fixture
def behave(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Behave:
    """Makes `quire doctor` do what the test says."""
    monkeypatch.chdir(tmp_path)

    def install(action: Callable[[Namespace], int]) -> None:
        module: Any = ModuleType("quire.cli.doctor")
        module.__spec__ = SimpleNamespace(name=module.__name__)
        module.run = action
        module.add_parser = lambda subparsers: subparsers.add_parser("doctor").add_argument("--temperature")
        monkeypatch.setitem(sys.modules, "quire.cli.doctor", module)

    return install


# -- imports


def test_import_quire_is_light_and_still_has_every_name() -> None:
    script = f"""
import sys, quire
heavy = [name for name in {HEAVY!r} if name in sys.modules]
assert not heavy, heavy
assert quire.SamplingParams(temperature=0).temperature == 0
assert issubclass(quire.QuireError, Exception)
heavy = [name for name in {HEAVY!r} if name in sys.modules]
assert not heavy, heavy
assert set(quire.__all__) <= set(dir(quire))
"""
    done = run_python("-c", script)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("argv", [["--help"], *([command, "--help"] for command in BUILT)], ids=" ".join)
def test_help_is_light(argv: list[str]) -> None:
    script = f"""
import sys
from quire.cli.main import main
assert main({argv!r}) == 0
heavy = [name for name in {HEAVY!r} if name in sys.modules]
assert not heavy, heavy
"""
    done = run_python("-c", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: quire")


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        quire.nonsense  # noqa: B018


def test_version_is_that_of_the_project(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == quire.__version__
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"quire {quire.__version__}\n"


def test_python_dash_m_is_the_same_command() -> None:
    assert run_python("-m", "quire", "--version").stdout == f"quire {quire.__version__}\n"


# -- usage


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out = capsys.readouterr().out
    for command in ("run", "chat", "doctor"):
        assert f"\n  {command} " in out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["rnu"], "unknown command 'rnu' (did you mean run?)"),
        (["xyzzy"], "unknown command 'xyzzy'"),
        (["--verison"], "unrecognized arguments: --verison (did you mean --version?)"),
        (["run", "--temprature", "1", "hi"], "unrecognized arguments: --temprature (did you mean --temperature?)"),
        (["run", "--max-modl-len=1", "hi"], "(did you mean --max-model-len?)"),
        (["run", "--temp", "1", "hi"], "unrecognized arguments: --temp"),
        (["run", "why", "is", "it"], "text with spaces needs quotes"),
        (["run", "hi", "--temperature"], "expected one argument"),
        (["run", "hi", "--max-tokens", "many"], "invalid int value: 'many'"),
        (["bench", "latency", "--rest", "soon"], "argument --rest: 'soon' is not a number of seconds"),
        (["bench", "latency", "--rest=-1"], "argument --rest: '-1' is not a number of seconds"),
        (["bench", "latency", "--alone=nan"], "argument --alone: 'nan' is not a number of seconds"),
        (["bench", "kernels", "--olny", "latent"], "unrecognized arguments: --olny"),
    ],
)
def test_wrong_usage_is_answered_with_advice(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == (1 if argv[0] == "bench" else 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert len(captured.err.splitlines()) == 2  # a short usage line and the error


def test_a_command_whose_file_is_missing_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(COMMANDS, "absent", "not built yet")
    assert main(["--help"]) == 0
    assert "absent" not in capsys.readouterr().out
    assert main(["absent"]) == 2
    assert "no command 'absent'" in capsys.readouterr().err


# -- endings


def raising(error: BaseException) -> Callable[[Namespace], int]:
    def action(args: Namespace) -> int:
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (QuireError("invalid_setting", "It is wrong.", "Do that."), 2, "quire: error: It is wrong. Do that."),
        (QuireError("out_of_memory", "Two\nlines\x1b[2J."), 1, "quire: error: Two lines[2J."),
        (FileNotFoundError(2, "No such file", "x.txt"), 1, "quire: error: No such file (x.txt)."),
        (KeyError("k"), 70, "quire: error: unexpected KeyError: 'k'. Set QUIRE_DEBUG=1 for the traceback."),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_every_ending_has_its_code_and_at_most_one_line(
    error: BaseException, code: int, line: str, behave: Behave, capsys: pytest.CaptureFixture[str]
) -> None:
    behave(raising(error))
    assert main(["doctor"]) == code
    captured = capsys.readouterr()
    assert captured.err == (line + "\n" if line else "")
    assert captured.out == ""


def test_debug_shows_the_traceback(
    behave: Behave, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_DEBUG", "1")
    behave(raising(ZeroDivisionError("oops")))
    assert main(["doctor"]) == 70
    assert "Traceback" in capsys.readouterr().err


def test_a_command_gets_its_arguments_and_gives_its_code(behave: Behave) -> None:
    behave(lambda args: int(args.temperature))
    assert main(["doctor", "--temperature", "3"]) == 3


def test_show_config_prints_settings_and_leaves(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--show-config", "--depth", "2", "--hub-token", "s3cret"]) == 0
    out = capsys.readouterr().out
    assert "s3cret" not in out
    settings = tomllib.loads(out)
    assert settings["engine"]["depth"] == 2
    assert settings["model"]["model"] == "smollm2"


def test_unknown_setting_is_one_line(tmp_path: Path) -> None:
    done = run_python("-m", "quire", "run", "hi", env={"QUIRE_MAX_ROW": "1"}, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    expected = "quire: error: Unknown setting QUIRE_MAX_ROW in the environment. Did you mean QUIRE_MAX_ROWS?\n"
    assert done.stderr == expected


# -- a reader that leaves


def test_closed_stdout_is_quiet(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    argv = [sys.executable, "-m", "quire", "run", "--show-config"]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, stdout=writer, stderr=subprocess.PIPE, env=env, cwd=tmp_path, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_one_line(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "quire", "run", "--show-config"]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    with open("/dev/full", "w") as full:
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, env=env, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stderr) == (1, b"quire: error: No space left on device.\n")
