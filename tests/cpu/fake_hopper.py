"""A rehearsal of a start on a Hopper card, on a machine without one: `python -m tests.cpu.fake_hopper`, in the place of
`quire.ahead.rehearsal`.

With an argument it is told on stdin a list of settings instead, and prints a line of JSON for each. `list`: what the
rehearsal tells of, and what went wrong on the way. `compile`: it does what the start itself would, and looks each
kernel up on disk, or compiles it: which were found, and which were not.
"""

from __future__ import annotations

import json
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import torch

from quire.ahead import light_meta, rehearsal
from quire.config import Config
from quire.config_build import override_config


def stand_in() -> None:
    card = SimpleNamespace(multi_processor_count=132, total_memory=150 << 30, shared_memory_per_block_optin=227 << 10)
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda device=None: card  # type: ignore[assignment, return-value]


def list_kernels(settings: dict[str, Any]) -> dict[str, list[str]]:
    told: list[str] = []
    trouble: list[str] = []
    rehearsal.note_launches(lambda kernel: told.append(kernel["name"]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            rehearsal.rehearse(override_config(Config(), settings))
        except Exception as error:
            trouble.append(f"{type(error).__name__}: {error}")
    trouble += [str(each.message) for each in caught]
    heavy = [name for name in ("sympy.core", "torch._dynamo.eval_frame") if name in sys.modules]
    return {"told": told, "trouble": trouble, "imported": heavy}


def compile_all(settings: dict[str, Any]) -> dict[str, list[str]]:
    from triton import knobs
    from triton.runtime import JITFunction

    found: dict[str, list[str]] = {"hit": [], "missed": []}
    run = JITFunction.run

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        found["hit" if cache_hit else "missed"].append(src.name)

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    rehearsal.note_launches(lambda kernel: None)
    knobs.runtime.jit_cache_hook = None
    knobs.compilation.listener = listen
    JITFunction.run = compile_only  # type: ignore[method-assign]
    rehearsal.rehearse(override_config(Config(), settings))
    return found


if __name__ == "__main__":
    stand_in()
    if sys.argv[1:] in (["list"], ["compile"]):
        light_meta.install()
        for each in json.loads(sys.stdin.readline()):
            print(json.dumps((list_kernels if sys.argv[1] == "list" else compile_all)(each)), flush=True)
    else:
        rehearsal.main()
