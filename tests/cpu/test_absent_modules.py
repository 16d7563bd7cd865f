"""A Python without Unix-only modules, functions and signals, as on Windows, and without uvloop, as it may be anywhere:
`quire run` answers, and every module of the API, the commands and the server can be imported.

A child process removes them after its third-party packages are imported, since those are other projects' work.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import quire
from quire.files.tiny_model import make_tiny_model

ROOT = Path(quire.__file__).parent.parent
CHILD = """
import asyncio, concurrent.futures.process, importlib, os, pkgutil, signal, subprocess, sys
import fastapi, httptools, jinja2, llguidance, msgspec, numpy, prometheus_client, rich.console, safetensors, tokenizers
import torch, torch._dynamo, transformers, uvicorn, zmq
for name in ("fcntl", "resource", "uvloop", "pwd", "grp", "termios", "tty", "pty", "readline", "syslog"):
    sys.modules[name] = None  # an import of it raises ImportError
for name in ("fork", "nice", "sched_getaffinity", "getuid", "setsid", "killpg", "register_at_fork", "statvfs",
             "getloadavg", "mkfifo", "memfd_create", "uname", "sysconf", "posix_fadvise"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGKILL", "SIGPROF", "SIGXCPU", "SIGBUS", "SIGSTOP", "SIGPIPE", "SIGALRM", "SIGSYS", "SIGTRAP",
             "setitimer", "ITIMER_PROF"):
    if hasattr(signal, name):
        delattr(signal, name)
from quire.cli.main import main
code = main(["run", sys.argv[1], "Hello", "--max-tokens", "4", "--random-weights"])
assert code == 0, code
import quire
skipped = ("quire.kernels.triton", "quire.chaos", "quire.agent.sandbox")
for module in pkgutil.walk_packages(quire.__path__, "quire."):
    if not module.name.startswith(skipped) and not module.name.endswith(("__main__", "libquire")):
        importlib.import_module(module.name)
print("all imported")
"""


def test_quire_runs_without_what_only_unix_has(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-c", CHILD, str(make_tiny_model(tmp_path / "tiny"))]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("all imported\n")
