"""Text workers: what they do, what they refuse, and that one task's end is no other's."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("tokenizers")
pytest.importorskip("fastapi")

from quire.files.tiny_model import make_tiny_model
from quire.server.http.bodies import decode_json
from quire.server.http.errors import ApiError
from quire.server.textwork import pool as pools
from quire.server.textwork.pool import InlineTextWork, WorkerPool
from quire.server.textwork.process import NICE
from quire.server.textwork.tasks import (
    CheckBody,
    DecodeTokens,
    EncodeText,
    FindWords,
    RenderChat,
    Setup,
    TextTasks,
    pack_ids,
    unpack_ids,
)
from quire.text.conversation import Conversation
from quire.types import QuireError

HELLO = RenderChat(Conversation([{"role": "user", "content": "hello"}]), 500, with_text=True)
# None of these is stopped by a rule of the sandbox before it has taken a gigabyte or far too long.
DOUBLED = "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
COMPARED = (
    DOUBLED + "{% set one = ns.x %}{% set ns.x = [1] %}"
    "{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ one == ns.x }}"
)
HOSTILE = {
    "tojson of a list doubled": DOUBLED + "{{ ns.x | tojson }}",
    "string of a list doubled": DOUBLED + "{{ ns.x | string }}",
    "lists added up": "{% set ns = namespace(x=[1]) %}{% for i in range(30) %}"
    "{% set ns.x = [ns.x, ns.x] | sum(start=[]) %}{% endfor %}",
    "join": "{% set x = ('a' * 1000000) %}{% set y = [x] * 3000 %}{{ y | join }}",
    "batch": "{{ range(9) | batch(900000000, 0) | list | length }}",
    "tojson with an indent": "{{ [[1]] * 10000 | tojson(indent=300000) }}",
    "translate": "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) | length }}",
    "replace as a filter": "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) | length }}",
}


def setup_of(folder: Path, template: str | None = None, **limits: Any) -> Setup:
    model = make_tiny_model(folder / "model")
    return Setup("folder", str(model), template, None, 4096, 128, 1 << 18, False, **limits)


def with_pool(setup: Setup, work: Callable[[WorkerPool], Awaitable[Any]]) -> tuple[Any, list[Any]]:
    """The result, and what was logged."""
    lines: list[Any] = []

    async def run() -> Any:
        pool = WorkerPool(setup, lambda level, what, **fields: lines.append((level, what, fields)))
        await pool.start()
        try:
            return await work(pool)
        finally:
            await pool.close()

    return asyncio.run(run()), lines


def test_a_worker_does_what_the_calling_process_would(tmp_path: Path) -> None:
    setup = setup_of(tmp_path)
    inline = InlineTextWork(TextTasks.load(setup))
    body = b'{"prompt": [1, 2, 3], "n": 2}'
    tasks = [HELLO, EncodeText("some words", 100), EncodeText("x" * 200_000, 300_000), FindWords(("ab",), ("\n",)),
             DecodeTokens(pack_ids([72, 105]), False), CheckBody("/v1/completions", body, 100)]  # fmt: skip

    async def work(pool: WorkerPool) -> list[Any]:
        return await asyncio.gather(*map(pool.run, tasks))

    found, lines = with_pool(setup, work)
    assert found == [asyncio.run(inline.run(task)) for task in tasks] and not lines


def test_refusals_cross_the_processes_as_they_are(tmp_path: Path) -> None:
    async def work(pool: WorkerPool) -> list[Any]:
        tasks = [EncodeText("x" * 999, 10), CheckBody("/v1/completions", b'{"prompt": [1, -1]}', 10),
                 CheckBody("/v1/completions", b'{"prompt": [1, 1, 1]}', 2), CheckBody("/v1/completions", b"{", 2),
                 CheckBody("/v1/chat/completions", b'{"messages": [' + b"[],[{}]," * 30_000 + b"1]}", 2),
                 EncodeText("word " * 1_000_000, 1000)]  # fmt: skip
        return await asyncio.gather(*map(pool.run, tasks), return_exceptions=True)

    found, _ = with_pool(setup_of(tmp_path), work)
    assert [isinstance(error, ApiError) for error in found] == [False, True, False, True, True, False]
    codes = [error.code for error in found]
    assert codes == ["prompt_too_long", "invalid_value", "prompt_too_long", "invalid_json", "body_too_complex",
                     "prompt_too_long"]  # fmt: skip
    assert found[1].param == "prompt[1]" and found[2].param == "prompt" and "at least" in found[5].what


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE.keys())
def test_whatever_a_template_does_ends_and_others_go_on(tmp_path: Path, template: str) -> None:
    """`tasks.RenderChat` of a hostile template is refused; the lane serves the next task, the other lane all along."""
    setup = setup_of(tmp_path, template, seconds=0.5, memory=256 << 20)

    async def work(pool: WorkerPool) -> list[Any]:
        hostile = asyncio.create_task(pool.run(HELLO))
        other = await pool.run(EncodeText("x" * 70_000, 100_000))  # the lane of long tasks
        results = await asyncio.gather(hostile, return_exceptions=True)
        return [*results, other, await pool.run(EncodeText("next", 100))]

    (refused, other, after), _ = with_pool(setup, work)
    assert isinstance(refused, QuireError) and refused.code == "template_error", refused
    assert len(unpack_ids(other.ids)) == 70_000 and len(unpack_ids(after.ids)) == 4


def test_the_kernel_ends_what_computes_too_long(tmp_path: Path) -> None:
    async def work(pool: WorkerPool) -> Any:
        return (await asyncio.gather(pool.run(HELLO), return_exceptions=True))[0]

    refused, lines = with_pool(setup_of(tmp_path, COMPARED, seconds=0.5), work)
    assert refused.code == "template_error" and "processor time" in refused.what
    assert [fields["exit"] for _, _, fields in lines] == [-signal.SIGPROF]


def test_a_message_full_of_control_tokens_costs_by_its_length(tmp_path: Path) -> None:
    """Each spelling begins a segment of its own. Joined by copies, 40,000 of them take the worker more than its
    processor time."""
    count = 40_000
    setup = setup_of(tmp_path, seconds=1.0)
    spelling = TextTasks.load(setup).tokenizer.special_spellings[0]
    full = RenderChat(Conversation([{"role": "user", "content": spelling * count}]), 1_000_000, with_text=True)

    async def work(pool: WorkerPool) -> Any:
        return await pool.run(full)

    rendered, lines = with_pool(setup, work)
    assert rendered.text.count(spelling) >= count and not lines


def test_the_kernel_refuses_memory_beyond_a_workers_limit(tmp_path: Path) -> None:
    template = "{% set x = 'a' * 1000000 %}{{ ([x] * 400) | join | length }}"

    async def work(pool: WorkerPool) -> Any:
        return (await asyncio.gather(pool.run(HELLO), return_exceptions=True))[0]

    assert with_pool(setup_of(tmp_path, template), work)[0].text == "400000000"
    refused, _ = with_pool(setup_of(tmp_path, template, memory=256 << 20), work)
    assert refused.code == "template_error", refused


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this system groups no sessions")
def test_workers_yield_the_processor_also_to_other_sessions(tmp_path: Path) -> None:
    """Between sessions, Linux compares the priority of groups and ignores that of processes."""

    async def work(pool: WorkerPool) -> list[tuple[int, str]]:
        await pool.run(EncodeText("x" * 70_000, 100_000))  # starts the worker for long tasks
        groups = [Path(f"/proc/{worker}/autogroup").read_text().split()[-1] for worker in pool.process_ids]
        return list(zip((os.getpriority(os.PRIO_PROCESS, worker) for worker in pool.process_ids), groups, strict=True))

    found, _ = with_pool(setup_of(tmp_path), work)
    assert len(found) == 2 and all(nice >= NICE and group == str(NICE) for nice, group in found), found


def test_a_worker_that_is_killed_is_replaced_and_its_task_done(tmp_path: Path) -> None:
    async def work(pool: WorkerPool) -> Any:
        (first,) = pool.process_ids
        os.kill(first, signal.SIGSTOP)  # so that it dies with a task, not before one
        tasks = [asyncio.create_task(pool.run(EncodeText(f"text {place}", 100))) for place in range(5)]
        while not pool._short._turn.locked():
            await asyncio.sleep(0)
        os.kill(first, signal.SIGKILL)
        found = await asyncio.gather(*tasks)
        (second,) = pool.process_ids
        assert second != first
        return found

    found, _ = with_pool(setup_of(tmp_path), work)
    assert [bytes(unpack_ids(one.ids)).decode() for one in found] == [f"text {place}" for place in range(5)]


def test_a_task_that_was_given_up_gives_no_other_its_reply(tmp_path: Path) -> None:
    async def work(pool: WorkerPool) -> Any:
        first = asyncio.create_task(pool.run(EncodeText("y" * 60_000, 100_000)))
        while not pool._short._turn.locked():
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()
        return await pool.run(EncodeText("mine", 100))

    found, _ = with_pool(setup_of(tmp_path), work)
    assert bytes(unpack_ids(found.ids)) == b"mine"


def test_too_many_waiting_tasks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MAX_WAITING", 3)

    async def work(pool: WorkerPool) -> Any:
        tasks = (pool.run(EncodeText("x", 100)) for _ in range(5))
        return await asyncio.gather(*tasks, return_exceptions=True)

    found, _ = with_pool(setup_of(tmp_path), work)
    assert [getattr(one, "code", "") for one in found] == ["", "", "", "queue_full", "queue_full"]


def test_a_body_is_packed_and_read_back_as_it_was(tmp_path: Path) -> None:
    """What a route sees of a large body is what it sees of a small one."""
    from quire.server.http.bodies import _read_packed, body_models, pack_body

    bodies = [
        ("/v1/completions", b'{"prompt": [[1, 2], [3]], "n": 2, "logit_bias": {"1": 2.5}}'),
        ("/v1/completions", b'{"prompt": ["a", "b"], "stop_token_ids": [1, 2]}'),
        ("/v1/embeddings", b'{"input": [1, 2, 3]}'),
        ("/detokenize", b'{"tokens": [5, 6]}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "metadata": {"a": [1, 2]}}'),
    ]
    for path, body in bodies:
        value = decode_json(body)
        plain, packed = body_models()[path].model_validate(value), _read_packed(path, pack_body(value))
        for name in type(plain).model_fields:
            one, two = getattr(plain, name), getattr(packed, name)
            if name in ("prompt", "input", "tokens") and not isinstance(one[0], str):
                two = [list(inner) for inner in two] if isinstance(one[0], list) else list(two)
            assert one == two, (path, name)
