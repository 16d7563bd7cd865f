"""A rehearsal of a start on a Hopper card, on a machine without one: `python -m tests.cpu.fake_hopper`.

With the argument `compile` it does what the start itself would: each kernel is looked up on disk, or compiled, and at
the end it prints how many were found and how many were not.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch

import quire.ahead.rehearsal
from quire.config import Config
from quire.config_build import override_config


def stand_in() -> None:
    card = SimpleNamespace(multi_processor_count=132, total_memory=150 << 30)
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda device=None: card  # type: ignore[assignment, return-value]


def compile_all(settings: dict[str, Any]) -> dict[str, list[str]]:
    from triton import knobs
    from triton.runtime import JITFunction

    found: dict[str, list[str]] = {"hit": [], "missed": []}
    run = JITFunction.run

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        found["hit" if cache_hit else "missed"].append(src.name)

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    quire.ahead.rehearsal.note_launches(lambda kernel: None)
    knobs.runtime.jit_cache_hook = None
    knobs.compilation.listener = listen
    JITFunction.run = compile_only  # type: ignore[method-assign]
    quire.ahead.rehearsal.rehearse(override_config(Config(), settings))
    return found


if __name__ == "__main__":
    stand_in()
    if sys.argv[1:] == ["compile"]:
        print(json.dumps(compile_all(json.loads(sys.stdin.readline()))))
    else:
        quire.ahead.rehearsal.main()
