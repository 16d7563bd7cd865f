"""What a trace shows: that masks are filled while the forward pass runs, step by step and by the clock."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.engine.grammar.matcher import GrammarCompiler, MaskFiller
from quire.engine.trace import FileTracer, Tracer
from quire.types import GrammarSpec, Plan, Request, StepOutput
from tests.pure.shadow import VOCAB, Rig

pytest.importorskip("llguidance")

TOKENS = [bytes([ord("A") + i]) for i in range(VOCAB - 1)] + [b"<eos>"]


class ThreadedDevice:
    """Computes in a thread of its own, as a GPU does beside the host. Its forward pass ends only when its sampling has
    been asked for: a host that waited for the one before it prepared the other would wait for ever."""

    def __init__(self, inner: Any, tracer: Tracer):
        self._inner, self._tracer, self._filler = inner, tracer, MaskFiller()
        self._thread = ThreadPoolExecutor(1)
        self._begun: dict[int, threading.Event] = {}

    def forward(self, plan: Plan) -> tuple[Plan, threading.Event, Future[Any]]:
        asked, begun = threading.Event(), self._begun.setdefault(plan.step, threading.Event())

        def compute() -> Any:
            with self._tracer.span("device", plan):
                begun.set()
                assert asked.wait(20), "the host waits for the forward pass before it fills masks"
                return self._inner.forward(plan)

        return plan, asked, self._thread.submit(compute)

    def sample(
        self, forward: tuple[Plan, threading.Event, Future[Any]], masks: Mapping[int, bytes] | None = None
    ) -> Any:
        _, asked, computed = forward
        asked.set()
        return _Sampled(self._thread.submit(lambda: self._inner.sample(computed.result(), masks).wait()))

    def fill(self, plan: Plan, requests: Mapping[str, Request]) -> dict[int, bytes]:
        """Not before the device has come to this step, so that what the trace shows is no accident."""
        assert self._begun[plan.step].wait(20)
        with self._tracer.span("fill", plan):
            return self._filler(plan, requests)

    def close(self) -> None:
        self._thread.shutdown()


class _Sampled:
    def __init__(self, output: Future[StepOutput]):
        self._output = output

    def wait(self) -> StepOutput:
        return self._output.result(20)


@pytest.mark.parametrize("depth", [1, 2])
def test_masks_are_filled_while_the_forward_pass_runs(tmp_path: Path, depth: int) -> None:
    rig = Rig(depth=depth, num_pages=200, max_batch_tokens=64, chunk_tokens=64)
    engine, tracer = rig.engine, FileTracer(tmp_path / "trace.json")
    device = ThreadedDevice(engine.workers, tracer)
    engine.tracer, engine.workers, engine._fill_masks = tracer, device, device.fill
    compiler = GrammarCompiler(TOKENS, (VOCAB - 1,))
    for place in range(3):
        grammar = compiler.compile(GrammarSpec("regex", "[B-F]{12}"))
        rig.add([5, 9, place], max_tokens=12, grammar=grammar, stop=frozenset({VOCAB - 1}))
    rig.add([1, 2, 3], max_tokens=12)
    rig.finish()
    engine.close()
    compiler.close()
    events = [event for event in json.loads((tmp_path / "trace.json").read_text()) if event.get("ph") == "X"]
    spans = {(event["name"], event["args"].get("step")): event for event in events}
    masked = sorted(step for name, step in spans if name == "mask")
    assert len(masked) >= 12
    for step in masked:
        forward, fill, mask, sample = (spans[name, step] for name in ("device", "fill", "mask", "sample"))
        assert forward["ts"] <= fill["ts"], "the forward pass is under way"
        assert mask["ts"] + mask["dur"] <= forward["ts"] + forward["dur"], "and still is when the masks are there"
        assert mask["ts"] + mask["dur"] <= sample["ts"]
    assert all(set("BCDEF") >= {chr(TOKENS[t][0]) for t in rig.outputs[f"r{i}"][:12]} for i in (1, 2, 3))


def test_a_trace_goes_on_in_the_next_life_of_the_engine(tmp_path: Path) -> None:
    """Closed, killed in the middle of a line, or gone: whatever the last life left, the file is one array of events."""
    path = tmp_path / "trace.json"
    path.write_text("of another run")
    FileTracer(path).close()
    second = FileTracer(path, engine_number=2)
    second.note("two")
    second.close()
    third = FileTracer(path, engine_number=3)
    third.note("three")
    third._file.flush()
    del third  # killed
    with open(path, "a") as file:
        file.write('{"name": "cut o')
    fourth = FileTracer(path, engine_number=4)
    fourth.note("four")
    fourth.close()
    events = json.loads(path.read_text())
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["quire", "quire (engine 2)", "quire (engine 3)", "quire (engine 4)"]
    assert [event["name"] for event in events if event["name"] in ("two", "three", "four")] == ["two", "three", "four"]
    times = [event["ts"] for event in events if "ts" in event]
    assert times == sorted(times), "one clock for all of them"
    path.unlink()
    FileTracer(path, engine_number=5).close()
    assert len(json.loads(path.read_text())) == 2
    path.write_bytes(b"")
    FileTracer(path, engine_number=6).close()
    assert len(json.loads(path.read_text())) == 2
