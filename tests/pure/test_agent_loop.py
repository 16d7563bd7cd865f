"""The agent's loop with an engine that plays a transcript: calls, limits, corrections, compaction, interrupts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from quire.agent.engines.seam import ModelAnswer, ModelCall, Question
from quire.agent.hooks import ToolHook, ToolHooks
from quire.agent.loop.agent import Agent, AgentLimits
from quire.agent.permissions import ApprovalRequest, Decision, Permissions
from quire.agent.session.log import SessionLog, read_records
from quire.agent.tools.seam import Risk, ToolContext, ToolResult, object_schema
from quire.agent.tools.toolbox import Toolbox
from quire.types import QuireError
from tests.pure.scripted_engine import Prepared, ScriptedEngine, calling


class Echo:
    """A tool without a sandbox, for tests."""

    description = "Says it again."
    parameters = object_schema(("text",), text={"type": "string"})

    def __init__(
        self, name: str = "echo", risk: Risk = Risk.OUTSIDE, act: Callable[[str, ToolContext], str] | None = None
    ) -> None:
        self.name, self.risk, self._act = name, risk, act
        self.ran: list[str] = []

    def describe(self, arguments: Mapping[str, Any]) -> str:
        return str(arguments["text"])

    def preview(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult | None:
        return None

    def run(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        self.ran.append(arguments["text"])
        return ToolResult(self._act(arguments["text"], context) if self._act else f"echo {arguments['text']}")

    def close(self) -> None:
        pass


class Made:
    """An agent with its engine, tool and events."""

    def __init__(self, folder: Path, answers: list[Prepared], *tools: Echo, **options: Any) -> None:
        self.engine = ScriptedEngine(answers, **options.pop("engine", {}))
        self.tools = tools or (Echo(),)
        self.events: list[dict[str, Any]] = []
        options.setdefault("permissions", Permissions(allow=["*"]))
        log = SessionLog.create(folder, project=str(folder), model="scripted", system="Be brief", tools=[])
        self.agent = Agent(self.engine, log, toolbox=Toolbox(self.tools), emit=self.events.append, **options)

    def types(self) -> list[str]:
        return [event["type"] for event in self.events]

    def contents(self, index: int) -> list[str]:
        return [f"{one['role'][0]}:{one.get('content') or ''}" for one in self.engine.asked[index].messages]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Made]:
    return lambda answers, *tools, **options: Made(tmp_path, answers, *tools, **options)


def test_calls_run_and_the_model_goes_on_with_their_results(make: Callable[..., Made]) -> None:
    made = make([calling(("echo", {"text": "a"}), ("echo", {"text": "b"}), text="First"), "All **done**"])
    outcome = made.agent.take("do it")
    assert (outcome.status, outcome.text, outcome.requests) == ("completed", "All **done**", 2)
    assert made.tools[0].ran == ["a", "b"]
    assert made.contents(1) == ["s:Be brief", "u:do it", "a:First", "t:echo a", "t:echo b"]
    assert [call["id"] for call in made.engine.asked[1].messages[2]["tool_calls"]] == ["c0", "c1"]


def test_events_have_the_names_and_order_that_scripts_expect(make: Callable[..., Made]) -> None:
    made = make([ModelAnswer("Look", "hm", [ModelCall("echo", '{"text": "a"}', "c0")]), "done"])
    made.agent.take("go")
    kinds = [
        (event["type"], event.get("item", {}).get("type")) for event in made.events if event["type"] != "item.updated"
    ]
    assert kinds == [
        ("turn.started", None),
        ("item.started", "reasoning"),
        ("item.started", "agent_message"),
        ("item.completed", "reasoning"),
        ("item.completed", "agent_message"),
        ("item.started", "tool_call"),
        ("item.completed", "tool_call"),
        ("item.started", "agent_message"),
        ("item.completed", "agent_message"),
        ("turn.completed", None),
    ]
    deltas = [event["item"]["delta"] for event in made.events if event["type"] == "item.updated"]
    assert "".join(deltas) == "hmLookdone"
    ids = [event["item"]["id"] for event in made.events if event["type"] == "item.started"]
    assert len(set(ids)) == len(ids)
    assert set(made.events[-1]["usage"]) == {"input_tokens", "cached_input_tokens", "output_tokens"}


def test_calls_that_read_run_side_by_side_and_others_in_order(make: Callable[..., Made]) -> None:
    meet = threading.Barrier(3, timeout=20)
    order: list[str] = []

    def reads(text: str, context: ToolContext) -> str:
        meet.wait()  # never passes unless three calls run at once
        return text

    def writes(text: str, context: ToolContext) -> str:
        order.append(text)
        return text

    tools = Echo("read", Risk.READ, reads), Echo("write", Risk.OUTSIDE, writes)
    calls = [("read", {"text": str(index)}) for index in range(3)]
    calls += [("write", {"text": "first"}), ("write", {"text": "second"})]
    made = make([calling(*calls), "ok"], *tools, sandbox=object())
    assert made.agent.take("go").status == "completed"
    assert order == ["first", "second"]
    assert made.contents(1)[-5:] == ["t:0", "t:1", "t:2", "t:first", "t:second"]


def test_a_turn_ends_at_its_limit_of_requests_and_of_tokens(make: Callable[..., Made]) -> None:
    again = [calling(("echo", {"text": str(index)}), ids=f"i{index}-") for index in range(10)]
    made = make(list(again), limits=AgentLimits(max_requests=3))
    outcome = made.agent.take("go")
    assert (outcome.status, outcome.requests) == ("limit", 3) and "3 requests" in outcome.error
    assert made.types()[-1] == "turn.failed" and made.events[-1]["error"]["status"] == "limit"
    made = make(list(again), limits=AgentLimits(max_output_tokens=10))
    assert made.agent.take("go").status == "limit" and len(made.engine.asked) == 2


def test_a_malformed_call_is_told_at_most_twice_and_the_tool_is_pinned(make: Callable[..., Made]) -> None:
    bad = '<tool_call>{"name": "echo", "arguments": {"text": "say "hi""}}</tool_call>'
    made = make([bad, bad, calling(("echo", {"text": "x"})), "done"])
    assert made.agent.take("go").text == "done"
    assert [question.tool_choice for question in made.engine.asked] == ["auto", "echo", "echo", "auto"]
    assert "not escaped" in made.contents(1)[-1] and made.tools[0].ran == ["x"]
    made = make([bad, bad, bad])
    outcome = made.agent.take("go")
    assert outcome.status == "failed" and outcome.error_code == "malformed_calls" and not made.tools[0].ran
    made.engine.answers = ["still here"]
    assert made.agent.take("again").text == "still here"  # the session goes on


def test_a_repaired_call_runs_and_is_kept_in_the_right_form(make: Callable[..., Made]) -> None:
    made = make(["I do it.\n<tool_call>{'name': 'echo', 'arguments': {'text': 'hi',}}</tool_call>", "done"])
    made.agent.take("go")
    assert made.tools[0].ran == ["hi"]
    message = made.engine.asked[1].messages[2]
    assert message["content"] == "I do it." and message["tool_calls"][0]["function"]["arguments"] == '{"text": "hi"}'


def test_what_a_tool_raises_is_a_result(make: Callable[..., Made]) -> None:
    def fails(text: str, context: ToolContext) -> str:
        raise RuntimeError("broken inside")

    made = make([calling(("echo", {"text": "a"})), "I see"], Echo(act=fails))
    assert made.agent.take("go").status == "completed"
    assert "RuntimeError: broken inside" in made.contents(1)[-1]


def test_long_results_are_cut_with_a_note(make: Callable[..., Made]) -> None:
    made = make([calling(("echo", {"text": "a"})), "ok"], Echo(act=lambda text, context: "x" * 200_000))
    made.agent.take("go")
    result = made.contents(1)[-1]
    assert len(result) < 31_000 and "170000 characters left out of 200000" in result


def test_an_engines_error_fails_the_turn_and_not_the_session(make: Callable[..., Made]) -> None:
    made = make([QuireError("request_failed", "The server went away."), "back again"])
    outcome = made.agent.take("go")
    assert (outcome.status, outcome.error_code) == ("failed", "request_failed")
    assert made.agent.take("still there?").text == "back again"
    assert made.contents(1)[-2:] == ["a:half an ans", "u:still there?"]


def test_ctrl_c_during_an_answer_keeps_what_was_said(make: Callable[..., Made]) -> None:
    made = make([KeyboardInterrupt(), "yes"])
    assert made.agent.take("go").status == "interrupted"
    made.agent.take("are you there?")
    assert made.contents(1) == ["s:Be brief", "u:go", "a:half an ans", "u:are you there?"]


def test_ctrl_c_during_a_call_ends_it_and_those_behind_it(make: Callable[..., Made]) -> None:
    running = threading.Event()

    def hangs(text: str, context: ToolContext) -> str:
        running.set()
        context.cancelled.wait(30)
        return "ended early"

    made = make([calling(("echo", {"text": "a"}), ("echo", {"text": "b"})), "yes"], Echo(act=hangs))
    import _thread

    def interrupt() -> None:
        running.wait(30)
        _thread.interrupt_main()

    threading.Thread(target=interrupt, daemon=True).start()
    assert made.agent.take("go").status == "interrupted"
    assert made.tools[0].ran == ["a"]
    assert made.agent.take("and now?").text == "yes"
    assert made.contents(1)[-3:] == ["t:ended early", "t:The user interrupted this call.", "u:and now?"]


# -- approval


def test_what_was_not_approved_does_not_run_and_the_model_learns_why(make: Callable[..., Made]) -> None:
    asked: list[ApprovalRequest] = []

    def ask(request: ApprovalRequest) -> tuple[Decision, str]:
        asked.append(request)
        return Decision.NO, "use another way"

    made = make([calling(("echo", {"text": "a"})), "ok"], permissions=Permissions(ask=ask))
    made.agent.take("go")
    assert made.tools[0].ran == [] and asked[0].line == "a"
    assert made.contents(1)[-1] == "t:The user did not allow this call: use another way"


def test_an_approval_for_the_session_is_asked_once_and_kept_nowhere(make: Callable[..., Made], tmp_path: Path) -> None:
    asked: list[str] = []

    def ask(request: ApprovalRequest) -> tuple[Decision, str]:
        asked.append(request.line)
        return Decision.SESSION, ""

    answers = [calling(("echo", {"text": "a"}), ids="x"), calling(("echo", {"text": "b"}), ids="y"), "ok"]
    made = make(answers, permissions=Permissions(ask=ask))
    made.agent.take("go")
    assert asked == ["a"] and made.tools[0].ran == ["a", "b"]
    records, _ = read_records(made.agent.session.path)
    assert {record["type"] for record in records} == {"session", "message", "call", "result", "delta", "turn"}


def test_nobody_to_ask_means_no(make: Callable[..., Made]) -> None:
    made = make([calling(("echo", {"text": "a"})), "ok"], permissions=Permissions())
    made.agent.take("go")
    assert made.tools[0].ran == [] and "--allow echo" in made.contents(1)[-1]


def test_yes_covers_the_sandbox_only() -> None:
    inside, outside = Echo("inside", Risk.RUN), Echo("outside", Risk.OUTSIDE)
    rules = Permissions(yes=True)
    assert rules.decide(inside, {"text": "a"}).allowed
    assert not rules.decide(outside, {"text": "a"}).allowed


@pytest.mark.parametrize(
    ("rule", "command", "allowed"),
    [
        ("shell", "rm -rf /", True),
        ("shell(git status*)", "git status", True),
        ("shell(git status*)", "git status --short src", True),
        ("shell(git status*)", "git status; rm -rf .", False),
        ("shell(git status*)", "git status && curl x", False),
        ("shell(git status*)", "git status $(rm x)", False),
        ("shell(git status*)", "git status\nrm x", False),
        ("shell(git status*)", "git status > x", False),
        ("shell(git status*)", "git push", False),
        ("shell(make test)", "make test", True),
        ("shell(make test)", "make test2", False),
        ("edit_file", "x", False),
    ],
)
def test_rules_of_the_allow_list(rule: str, command: str, allowed: bool) -> None:
    tool = Echo("shell", Risk.RUN)
    assert Permissions(allow=[rule]).decide(tool, {"text": command}).allowed is allowed


def test_a_rule_that_is_none_is_refused() -> None:
    with pytest.raises(QuireError, match="no rule"):
        Permissions(allow=["shell(git"])


# -- hooks


def test_a_hook_blocks_a_call_and_another_adds_to_a_result(make: Callable[..., Made]) -> None:
    hooks = ToolHooks([
        ToolHook("before", "echo", lambda call: "not that" if call["arguments"]["text"] == "bad" else None),
        ToolHook("after", "*", lambda call: "looked at it"),
    ])  # fmt: skip
    made = make([calling(("echo", {"text": "bad"}), ("echo", {"text": "good"})), "ok"], hooks=hooks)
    made.agent.take("go")
    assert made.tools[0].ran == ["good"]
    assert made.contents(1)[-2:] == ["t:A hook blocked this call: not that", "t:echo good\n[hook: looked at it]"]


def test_a_program_as_a_hook(make: Callable[..., Made]) -> None:
    blocks = ("/bin/sh", "-c", "cat | grep -q forbidden && echo no such words && exit 2; exit 0")
    hooks = ToolHooks([ToolHook("before", "*", blocks)])
    made = make([calling(("echo", {"text": "forbidden"}), ("echo", {"text": "fine"})), "ok"], hooks=hooks)
    made.agent.take("go")
    assert made.tools[0].ran == ["fine"] and "no such words" in made.contents(1)[-2]


def test_a_hook_that_fails_blocks(make: Callable[..., Made]) -> None:
    made = make(
        [calling(("echo", {"text": "a"})), "ok"], hooks=ToolHooks([ToolHook("before", "*", ("/no/such/program",))])
    )
    made.agent.take("go")
    assert made.tools[0].ran == [] and "can't be run" in made.contents(1)[-1]


# -- a full context


def test_old_turns_become_a_summary_and_the_last_ones_stay(make: Callable[..., Made]) -> None:
    filler = " ".join(["word"] * 60)
    made = make([f"{filler} one", f"{filler} two", "the summary", "three"], engine={"context_len": 160})
    for text in ("a", "b", "c"):
        made.agent.take(text)
    assert made.engine.asked[2].tool_choice == "none"
    shown = made.contents(3)
    assert shown[1].endswith("the summary") and shown[3:] == ["u:b", f"a:{filler} two", "u:c"]
    first = made.engine.asked[2].messages  # the request for the summary has the old prefix
    assert first[:3] == made.engine.asked[1].messages[:3]
    assert len(made.agent.session.state.messages) == 6  # all of them stay on disk
    assert made.agent.take  # and the session goes on


def test_one_turn_that_fills_the_context_is_compacted_between_its_own_steps(make: Callable[..., Made]) -> None:
    filler = " ".join(["word"] * 40)
    answers: list[Prepared] = [calling(("echo", {"text": filler}), ids=f"i{index}-") for index in range(3)]
    made = make([*answers, "sum", "done"], engine={"context_len": 260})
    outcome = made.agent.take("go")
    assert (outcome.status, outcome.text) == ("completed", "done")
    for question in made.engine.asked:
        asked = {call["id"] for one in question.messages for call in one.get("tool_calls") or ()}
        assert {one["tool_call_id"] for one in question.messages if one["role"] == "tool"} <= asked


def test_a_message_that_never_fits_is_the_engines_error(make: Callable[..., Made]) -> None:
    def refuses(question: Question) -> str:
        raise QuireError("prompt_too_long", "It has too many tokens.")

    made = make([refuses, "ok"], engine={"context_len": 50})
    assert made.agent.take(" ".join(["word"] * 100)).error_code == "prompt_too_long"


def test_undo_takes_the_last_message_back(make: Callable[..., Made]) -> None:
    made = make(["one", "two", "three"])
    made.agent.take("a")
    made.agent.take("b")
    assert made.agent.undo() == "b"
    made.agent.take("c")
    assert made.contents(2) == ["s:Be brief", "u:a", "a:one", "u:c"]


def test_a_model_without_tool_support_gets_them_in_words(make: Callable[..., Made]) -> None:
    made = make(['{"name": "echo", "arguments": {"text": "hi"}}', "done"], engine={"takes_tools": False})
    assert made.agent.take("go").text == "done"
    assert made.tools[0].ran == ["hi"]
    assert "echo: Says it again." in made.contents(0)[0]
    assert made.contents(1)[-2:] == ['a:{"name": "echo", "arguments": {"text": "hi"}}', "u:Result: echo hi"]


def test_nothing_waits_for_a_tool_that_takes_no_notice(
    make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.agent.loop import calls

    monkeypatch.setattr(calls, "_STOP_SECONDS", 0.0)
    release, running = threading.Event(), threading.Event()

    def hangs(text: str, context: ToolContext) -> str:
        running.set()
        release.wait(60)
        return "late"

    import _thread

    def interrupt() -> None:
        running.wait(30)
        _thread.interrupt_main()

    made = make([calling(("echo", {"text": "a"})), "yes"], Echo(act=hangs))
    threading.Thread(target=interrupt, daemon=True).start()
    began = time.monotonic()
    assert made.agent.take("go").status == "interrupted"
    release.set()
    assert time.monotonic() - began < 30  # the tool alone would have taken 60
    assert "may still be running" in str(made.agent.session.state.messages[-1]["content"])


def test_a_server_that_says_its_context_is_full_gets_a_summary(make: Callable[..., Made]) -> None:
    full = QuireError("context_full", "The server answered 400: more than its context window.")
    made = make(["one", "two", full, "the summary", "three"], engine={"context_len": None})
    for text in ("a", "b"):
        made.agent.take(text)
    assert made.agent.take("c").text == "three"
    assert made.engine.asked[3].tool_choice == "none" and made.contents(4)[1].endswith("the summary")
    assert made.contents(4)[-1] == "u:c"


def test_a_full_context_that_stays_full_is_the_error(make: Callable[..., Made]) -> None:
    full = QuireError("context_full", "The server answered 400: more than its context window.")
    made = make([full, "fine"], engine={"context_len": None})
    assert made.agent.take("a").error_code == "context_full"
    assert made.agent.take("b").text == "fine"
