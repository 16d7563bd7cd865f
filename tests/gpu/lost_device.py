"""Breaks the CUDA context in the middle of a run and prints what the driver makes of it; `test_engine` starts this."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from quire.engine.host.driver import EngineDriver
from quire.types import QuireError, SamplingParams
from tests.cpu.rig import load, make_engine, make_request
from tests.cpu.tiny_models import make_tiny

DEVICE = torch.device("cuda", 0)


class Mailbox:
    def __init__(self, messages: list[Any]):
        self.messages = messages
        self.ends: dict[str, str] = {}

    def receive(self, block: bool) -> list[Any]:
        taken, self.messages = self.messages, []
        return taken

    def wait(self, seconds: float) -> None: ...

    def wake(self) -> None: ...

    def send(self, deltas: list[Any]) -> None:
        pass

    def report(self, what: Any) -> None:
        raise AssertionError(f"nobody is to blame for a lost device: {what}")

    def abandon(self, open_ids: Sequence[str], failure: QuireError) -> None:
        self.ends |= dict.fromkeys(open_ids, failure.code)


def main() -> None:
    path = Path(tempfile.mkdtemp(prefix="quire-gpu-test-"))
    make_tiny("llama", path, head_dim=64)
    model = load(path, 16, DEVICE)
    engine = make_engine(model, device=DEVICE, page_tokens=16, depth=2, graphs=False)
    forward, steps = model.forward, []

    def breaks(step: Any, caches: Any) -> Any:
        steps.append(step)
        if len(steps) == 4:
            torch.zeros(4, device=DEVICE)[torch.tensor([1 << 20], device=DEVICE)]  # an assertion on the device
        return forward(step, caches)

    model.forward = breaks  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    mailbox = Mailbox([make_request("a", [1, 2, 3], params), make_request("b", [4, 5], params)])
    driver = EngineDriver(engine, mailbox)
    driver.run()
    assert driver.failure is not None
    print(f"{driver.failure.code}: {driver.failure} {mailbox.ends}", flush=True)
    assert mailbox.ends == {"a": "device_lost", "b": "device_lost"}


if __name__ == "__main__":
    main()
    os._exit(0)  # torch aborts when it tidies up after a lost device
