"""The engine process of the chaos gate: the real engine with wrappers that inject armed faults.

Started as `python -m quire.chaos.engine_process ORDERS ADDRESS` in place of `quire.cli.serve_engine`. The
wrappers sit at the engine's seams: workers, masks, the grammar compile queue, the socket.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quire.chaos.faults import ArmedFaults, poison_of
from quire.chaos.faulty_disk import FaultyDisk
from quire.config import Config
from quire.engine.host.process import Built, Socket, run_engine_process
from quire.engine.loop import FillMasks
from quire.engine.workers import Ticket, Workers
from quire.startup.build_engine import build_engine
from quire.types import Plan, Request, StepOutput

BALLAST_BYTES = 1 << 30


class FaultyWorkers:
    """Workers that inject armed faults and poisons."""

    def __init__(self, inner: Workers, faults: ArmedFaults):
        self._inner, self._faults = inner, faults
        self._poison: dict[int, str] = {}  # row -> poison of its request
        self._ballast = b""

    def forward(self, plan: Plan) -> Any:
        for row in plan.freed:
            self._poison.pop(row, None)
        for init in plan.added:
            self._poison.pop(init.row, None)
            poison = poison_of(init.seed)
            if poison is not None:
                self._poison[init.row] = poison
        poisons = {self._poison.get(row.row) for row in plan.rows}
        if "die" in poisons or self._faults.take("crash"):
            os._exit(86)
        if "raise" in poisons:
            raise RuntimeError("chaos: a poisonous request")
        if self._faults.take("forward"):
            raise RuntimeError("chaos: the forward pass failed")
        if self._faults.take("memory"):
            raise MemoryError("chaos: out of memory")
        if self._faults.take("outgrow"):  # armed by a test only: the gate reports the peak memory
            self._ballast = b"\1" * BALLAST_BYTES
        if self._faults.take("host_page"):
            self._corrupt_host()
        return self._inner.forward(plan)

    def sample(self, forward: Any, masks: Mapping[int, bytes] | None = None) -> Ticket:
        # logits hold a row of a request's last token, and of each of its drafts
        samples = [row.row for row in forward.plan.rows if row.wants_sample for _ in range(1 + row.num_drafts)]
        spoiled = [index for index, row in enumerate(samples) if self._poison.get(row) == "nonfinite"]
        if spoiled:
            import torch

            with torch.inference_mode():
                forward.logits[spoiled, 3] = float("nan")
        if self._faults.take("sample"):
            raise RuntimeError("chaos: sampling failed")
        ticket = self._inner.sample(forward, masks)
        return FailingTicket() if self._faults.take("wait") else FaultyTicket(ticket, self._faults)

    def warm_ups(self) -> Iterator[None]:
        return self._inner.warm_ups()

    def close(self) -> None:
        self._inner.close()

    def _corrupt_host(self) -> None:
        import torch

        inner: Any = self._inner
        while not hasattr(inner, "store"):  # below the guard and the flight record
            inner = inner.inner if hasattr(inner, "inner") else inner._inner
        with torch.inference_mode():
            for tensor in inner.store._host.values():
                tensor.add_(1.0)


class FailingTicket:
    def wait(self) -> StepOutput:
        raise RuntimeError("chaos: the device lost a step")


class FaultyTicket:
    """A ticket whose output may make the commit fail halfway."""

    def __init__(self, inner: Ticket, faults: ArmedFaults):
        self._inner, self._faults = inner, faults

    def wait(self) -> StepOutput:
        output = self._inner.wait()
        if self._faults.take("commit"):
            output.tokens = output.tokens[:-1]  # one row's tokens are missing: an IndexError during the commit
        if self._faults.take("starve"):
            output.tokens = UnreadableTokens(output.tokens)
        return output


class UnreadableTokens(list[list[int]]):
    """Tokens whose access raises MemoryError."""

    def __getitem__(self, index: Any) -> Any:
        raise MemoryError("chaos: out of memory where the engine can't go on")


class FaultyGrammarQueue:
    """A grammar compile queue that fails to prepare poisoned requests."""

    def __init__(self, inner: Any):
        self._inner = inner

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def take(self, request: Request) -> bool:
        if poison_of(request.seed) == "prepare":
            raise RuntimeError("chaos: preparing failed")
        return bool(self._inner.take(request))


def faulty_masks(faults: ArmedFaults, fill: FillMasks) -> FillMasks:
    def fill_masks(plan: Plan, requests: Mapping[str, Request]) -> Mapping[int, bytes]:
        if any(poison_of(requests[r.request_id].seed) == "mask" for r in plan.rows if r.request_id in requests):
            raise RuntimeError("chaos: masking a poisonous request failed")
        if faults.take("mask"):
            raise RuntimeError("chaos: masking failed")
        return fill(plan, requests)

    return fill_masks


class FaultySocket:
    """A socket that loses, duplicates and damages frames, and adds foreign ones."""

    def __init__(self, inner: Socket, faults: ArmedFaults):
        self._inner, self._faults = inner, faults
        self._ahead: list[bytes] = []

    def send(self, frame: bytes) -> None:
        faults = self._faults
        if faults.take("frame_lost"):
            return
        if faults.take("frame_damaged"):
            place = len(frame) // 2
            frame = frame[:place] + bytes([frame[place] ^ 16]) + frame[place + 1 :]
        if faults.take("frame_foreign"):
            self._inner.send(b"\x00garbage from elsewhere" * 7)
        self._inner.send(frame)
        if faults.take("frame_doubled"):
            self._inner.send(frame)

    def recv(self, flags: int = 0) -> bytes:
        if self._ahead:
            return self._ahead.pop()
        if self._faults.take("order_foreign"):
            return b"GET / HTTP/1.1\r\n\r\n"
        frame = self._inner.recv(flags)
        if self._faults.take("order_damaged"):
            return frame[:-1] + bytes([frame[-1] ^ 1])
        if self._faults.take("order_doubled"):
            self._ahead.append(frame)
        return frame

    def poll(self, timeout: int) -> int:
        return self._inner.poll(timeout)


def main(orders: str, address: str) -> int:
    faults = ArmedFaults()

    def build(config: Config) -> Built:
        built = build_engine(config)
        built.engine.wrap(lambda workers: FaultyWorkers(workers, faults), lambda fill: faulty_masks(faults, fill))
        for tier in built.engine.scheduler.cache.stores:
            tier.wrap(lambda store: FaultyDisk(store, faults))
        faults.listen(Path(orders))
        grammars: Any = None if built.grammars is None else FaultyGrammarQueue(built.grammars)
        return Built(built.engine, built.ready, grammars)

    def wrap_socket(socket: Socket) -> Socket:
        return FaultySocket(socket, faults)

    return run_engine_process(address, build, wrap_socket)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
