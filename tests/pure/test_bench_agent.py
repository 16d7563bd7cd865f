"""The agent benchmark without a model: traces are read from session files, and requests replayed as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.agent.engines.seam import AnswerStream, ModelAnswer, Question
from quire.agent.loop.agent import Agent
from quire.agent.permissions import Permissions
from quire.agent.session.log import SessionLog
from quire.agent.tools.toolbox import Toolbox
from quire.bench.agent.coding_session import NAME, coding_session
from quire.bench.agent.run import AgentLoad, bench_agent
from quire.bench.agent.tables import show_agent
from quire.bench.agent.trace import DEFAULT_OUTPUT, read_trace, trace_of
from quire.cli.main import main
from quire.types import QuireError
from tests.e2e.transcript_server import transcript_server
from tests.pure.scripted_engine import ScriptedEngine, calling
from tests.pure.test_agent_loop import Echo


class CountingEngine(ScriptedEngine):
    """Answers everything, and tells how much of a prompt the one before it held."""

    forgets = False

    def ask(self, question: Question) -> AnswerStream:
        self.asked.append(question)
        size = len(json.dumps(question.messages)) // 4
        known, self.known = 0 if self.forgets else self.known, size
        yield from ()
        tokens = int(question.sampling["max_tokens"])
        return ModelAnswer("x", prompt_tokens=size, cached_tokens=min(known, size), output_tokens=tokens, seconds=1.0)


def test_the_built_in_trace_is_a_coding_session() -> None:
    trace = trace_of(NAME, coding_session())
    assert len(trace.requests) == 16 and [one.turn for one in trace.requests].count(0) == 5
    assert trace.requests[0].messages[0]["role"] == "system" and not trace.requests[0].is_follow_up
    for request in trace.requests:
        asked = {call["id"] for one in request.messages for call in one.get("tool_calls") or ()}
        told = {one["tool_call_id"] for one in request.messages if one["role"] == "tool"}
        assert asked == told
    assert sum(one.is_follow_up for one in trace.requests) == 13 and sum(one.delay for one in trace.requests) > 5
    for before, after in zip(trace.requests, trace.requests[1:], strict=False):
        assert after.messages[: len(before.messages)] == before.messages  # so that all of it can be matched


def test_a_saved_session_is_replayed_as_it_was(tmp_path: Path) -> None:
    engine = ScriptedEngine([calling(("echo", {"text": "a"})), "done", "more words here"])
    log = SessionLog.create(tmp_path, project="/p", model="scripted", system="Be brief", tools=["shell", "echo"])
    agent = Agent(engine, log, toolbox=Toolbox([Echo()]), permissions=Permissions(["*"]))
    agent.take("first")
    agent.take("second")
    log.close()
    trace = read_trace(log.path)
    assert [one.messages for one in trace.requests] == [question.messages for question in engine.asked]
    assert [one.turn for one in trace.requests] == [0, 0, 1]
    assert [one.output_tokens for one in trace.requests] == [5, 1, 3]


def test_the_report_has_each_request_and_the_matched_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    trace = trace_of(NAME, coding_session())
    engine = CountingEngine([])
    report = bench_agent(lambda: engine, trace, AgentLoad(delay_scale=0.0, max_output=50))
    assert len(report["requests"]) == 16 and report["pass"] and report["matched"] == 1.0
    assert max(one["output_tokens"] for one in report["requests"]) == 50
    assert report["prompt_tokens"] - report["computed_tokens"] == sum(
        one["cached_tokens"] for one in report["requests"]
    )
    assert [tool["function"]["name"] for tool in engine.asked[0].tools] == trace.tools
    show_agent(report)
    assert "matched: 1.000" in capsys.readouterr().out


def test_an_engine_that_forgets_misses_the_gate_and_one_that_says_nothing_has_none() -> None:
    trace = trace_of(NAME, coding_session())
    half = CountingEngine([])
    half.known = 10  # of the first prompt; then nothing
    half.forgets = True
    report = bench_agent(lambda: half, trace, AgentLoad(delay_scale=0.0))
    assert report["matched"] is None and report["bars"] == [] and report["pass"]

    class Forgetful(CountingEngine):
        def ask(self, question: Question) -> AnswerStream:
            answer = yield from super().ask(question)
            answer.cached_tokens //= 2
            return answer

    report = bench_agent(lambda: Forgetful([]), trace, AgentLoad(delay_scale=0.0))
    assert 0.4 < report["matched"] < 0.6 and not report["pass"]


def test_sessions_at_once_share_no_prefix() -> None:
    engines: list[CountingEngine] = []

    def open_one() -> CountingEngine:
        engines.append(CountingEngine([]))
        return engines[-1]

    report = bench_agent(open_one, trace_of(NAME, coding_session()), AgentLoad(sessions=3, delay_scale=0.0))
    assert len(report["requests"]) == 48
    assert len({engine.asked[0].messages[0]["content"] for engine in engines}) == 3


def test_files_that_are_no_traces_are_refused(tmp_path: Path) -> None:
    (tmp_path / "no.jsonl").write_text('{"type": "message"}\n')
    (tmp_path / "empty.jsonl").write_text('{"type": "session", "id": "x"}\n')
    for name, why in (("no.jsonl", "no session"), ("empty.jsonl", "no answer"), ("missing.jsonl", "can't be read")):
        with pytest.raises(QuireError, match=why):
            read_trace(tmp_path / name)
    assert DEFAULT_OUTPUT > 0


def test_the_command_replays_against_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with transcript_server(["words"] * 32) as server:
        assert main(["bench", "agent", "--url", server.url, "--delay-scale", "0", "--sessions", "2", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["sessions"] == 2 and 0.3 < report["matched"] < 0.9  # the server says that it knew half
    assert len(server.asked) == 32 and server.asked[0]["ignore_eos"] is True
    assert main(["bench", "agent", "--sessions", "2"]) == 1
    assert "give --url" in capsys.readouterr().err
