"""Ctrl-C at any point of a call: the caller's requests end, the LLM works on, and all it holds is accounted for."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import quire
from quire import LLM, AsyncLLM, QuireError, SamplingParams
from quire.engine.host.interrupts import MAX_HELD, HeldInterrupts
from tests.cpu.rig import LateDevice
from tests.cpu.tiny_llm import make_tiny_llm

HOME = str(Path(quire.__file__).parent)
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
KNOBS: dict[str, Any] = {"dtype": "float32", "max_model_len": 200, "num_pages": 100, "max_rows": 8, "page_tokens": 4}
PROMPT = "why is the sky blue"
POINTS = 30  # of each way to interrupt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llm(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=[1, 2])
def llm(request: pytest.FixtureRequest, folder: Path) -> LLM:
    """Of both depths; at the second the interrupt finds steps in flight."""
    made = LLM(str(folder), **KNOBS, depth=request.param, max_batch_tokens=64)
    if request.param == 2:
        made.engine.workers = LateDevice(made.engine.workers)
    return made


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "whoever was there is there again"
    signal.signal(signal.SIGINT, before)


def check_works(llm: LLM, expected: list[int]) -> None:
    assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected
    scheduler = llm.engine.scheduler
    assert not scheduler.requests and not llm._replies, "the interrupted request is gone"
    llm.engine.run_until_idle()
    scheduler.check()
    assert scheduler.cache.available(0) == scheduler.cache.pools[0].num_units - 1


def raise_it() -> None:
    raise KeyboardInterrupt


def signal_it() -> None:
    signal.raise_signal(signal.SIGINT)


class Interrupter:
    """Counts the bytecodes that run in the package, and does something at one of them."""

    def __init__(self, place: int, act: Callable[[], None]):
        self.count, self._place, self._act = 0, place, act

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(HOME) or name.endswith("interrupts.py"):  # where a signal is held it can't raise
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.count += 1
            if self.count == self._place:
                sys.settrace(None)
                self._act()
        return self


def interrupted(work: Callable[[], object], place: int, act: Callable[[], None]) -> tuple[bool, int]:
    """Whether the work was interrupted, and how many bytecodes it ran until then."""
    tracer = Interrupter(place, act)
    before = sys.gettrace()
    try:
        sys.settrace(tracer)
        work()
    except KeyboardInterrupt:
        return True, tracer.count
    finally:
        sys.settrace(before)
    return False, tracer.count


def stream(llm: LLM) -> None:
    for _ in llm.stream(PROMPT, GREEDY):
        pass


def leave_stream(llm: LLM) -> None:
    pieces = llm.stream(PROMPT, LONG)
    next(pieces)
    pieces.close()


def generate(llm: LLM) -> None:
    llm.generate(["light is scattered", PROMPT, "why"], GREEDY)


@pytest.mark.parametrize("act", [raise_it, signal_it])
@pytest.mark.parametrize("work", [stream, leave_stream, generate])
def test_an_interrupt_at_any_bytecode_leaves_a_working_engine(
    llm: LLM, work: Callable[[LLM], None], act: Callable[[], None]
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    expected = llm.generate(PROMPT, GREEDY)[0].token_ids
    work(llm)
    check_works(llm, expected)  # so that the run which is counted starts as those which are interrupted
    _, total = interrupted(lambda: work(llm), 0, act)
    assert total > 1000
    num_hit = 0
    for _ in range(POINTS):
        place = rng.randrange(1, total + 1)
        hit, _ = interrupted(lambda: work(llm), place, act)
        num_hit += hit
        check_works(llm, expected)
    assert num_hit > POINTS * 0.8, "a place may lie beyond the end: not every run takes the same steps"


CHILD = """
import random, sys, threading, signal, os, time
from quire import LLM, SamplingParams
seed, rounds = int(sys.argv[2]), int(sys.argv[3])
rng = random.Random(seed)
llm = LLM(sys.argv[1], dtype="float32", max_model_len=200, num_pages=100, max_rows=8, page_tokens=4)
greedy = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
expected = llm.generate("why", greedy)[0].token_ids
go, num_sent = threading.Semaphore(0), 0
def kill():
    global num_sent
    while True:
        go.acquire()
        for _ in range(rng.randrange(200_000)):
            pass
        os.kill(os.getpid(), signal.SIGINT)
        num_sent += 1
def wait_until_sent():  # a count, no semaphore: the signal may well interrupt the wait for itself
    while num_sent <= number:
        time.sleep(0)
threading.Thread(target=kill, daemon=True).start()
num_early = 0
for number in range(rounds):
    done = False
    try:
        go.release()
        if number % 2:
            for _ in llm.stream("why is the sky", long):
                pass
        else:
            llm.generate(["why is the sky", "light"], long)
        done = True
        wait_until_sent()
        for _ in range(100_000):
            pass
        raise SystemExit("the signal was lost")
    except KeyboardInterrupt:
        pass
    num_early += not done
    wait_until_sent()
    assert llm.generate("why", greedy)[0].token_ids == expected, number
    assert not llm.engine.scheduler.requests, number
    llm.engine.scheduler.check()
print("interrupted", num_early)
"""


def test_real_signals_at_any_moment(folder: Path) -> None:
    seed, rounds = random.randrange(1 << 32), 60
    print(f"seed {seed}")
    command = [sys.executable, "-c", CHILD, str(folder), str(seed), str(rounds)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert int(ended.stdout.split()[-1]) > 0, "some came while the model answered"


def test_a_stream_beside_an_interrupted_one_goes_on(llm: LLM) -> None:
    expected = [t for chunk in llm.stream("light", LONG) for t in chunk.token_ids]
    other = llm.stream("light", LONG)
    found = list(next(other).token_ids)
    pieces = llm.stream(PROMPT, LONG)
    next(pieces)
    forward = llm.engine.workers.forward

    def strike(plan: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return forward(plan)

    llm.engine.workers.forward = strike
    try:
        with pytest.raises(KeyboardInterrupt):
            next(pieces)
    finally:
        llm.engine.workers.forward = forward
    found += [t for chunk in other for t in chunk.token_ids]
    assert found == expected, "it lost nothing"


def test_what_books_that_can_not_be_trusted_held_is_told_so(llm: LLM) -> None:
    """An exception thrown into a commit, which no signal can do: all start over, and no caller waits for ever."""
    expected = llm.generate(PROMPT, GREEDY)[0].token_ids
    other = llm.stream("light", LONG)
    next(other)
    commit = llm.engine.scheduler.commit

    def torn(plan: Any, output: Any) -> Any:
        commit(plan, output)
        raise KeyboardInterrupt

    llm.engine.scheduler.commit = torn  # of this scheduler, which the next one is not
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPT, GREEDY)
    with pytest.raises(QuireError, match="send the request again"):
        list(other)
    check_works(llm, expected)


def test_a_stream_collected_in_the_middle_of_a_turn_ends_after_it(llm: LLM) -> None:
    """Of a cycle of frames and tracebacks the collector decides when it goes."""
    expected = llm.generate(PROMPT, GREEDY)[0].token_ids
    left = [llm.stream("light", LONG)]
    next(left[0])
    forward, seen = llm.engine.workers.forward, []

    def collect(plan: Any) -> Any:
        left.clear()
        seen.append(set(llm.engine.scheduler.requests))
        return forward(plan)

    llm.engine.workers.forward = collect
    try:
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected
    finally:
        llm.engine.workers.forward = forward
    assert len(seen[0]) == 2 and len(seen[-1]) == 1, "not in the middle of the turn, but right after it"
    check_works(llm, expected)


def test_the_third_signal_does_not_wait_and_other_threads_hold_nothing() -> None:
    with pytest.raises(KeyboardInterrupt), HeldInterrupts():
        for _ in range(MAX_HELD):
            signal_it()
        with pytest.raises(KeyboardInterrupt):
            signal_it()
        signal_it()  # held again, until the block ends

    seen: list[object] = []

    def look() -> None:
        with HeldInterrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_an_event_loop_that_was_interrupted_leaves_a_working_async_llm(folder: Path) -> None:
    """Closed without its tasks: nobody reads their requests any more, so these end, and the next loop is served."""
    llm = AsyncLLM(str(folder), **KNOBS)

    async def ask() -> list[int]:
        return (await llm.generate(PROMPT, GREEDY)).token_ids

    expected = asyncio.run(ask())
    loop = asyncio.new_event_loop()
    (request,) = llm.edge.requests(llm.edge.encode(PROMPT), LONG)
    llm._sinks[request.id] = (loop, asyncio.Queue())
    loop.close()
    llm._thread.submit(request)
    assert asyncio.run(ask()) == expected and not llm._sinks
    asyncio.run(llm.close())
