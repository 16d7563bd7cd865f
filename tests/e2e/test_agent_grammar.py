"""The agent on a model in this process whose calls a grammar forces: files are written, edited, and a test is run.

The model is tiny and random, or the built-in one. Each question offers one tool whose arguments have one value each, so
what is written is certain; grammar, tokenizer, parser, loop and sandbox are the real ones.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.agent.assemble import AgentOptions, open_agent
from quire.agent.engines.local import LocalEngine
from quire.agent.engines.seam import AnswerStream, Question
from quire.types import SamplingParams
from tests.cpu.tiny_llm import make_tiny_llm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")

STEPS: list[tuple[str, dict[str, Any]]] = [
    ("write_file", {"path": "calc.py", "content": "def add(a, b):\n    return a - b\n"}),
    ("write_file", {"path": "check.py", "content": "from calc import add\nassert add(2, 3) == 5\nprint('fine')\n"}),
    ("shell", {"command": "python3 check.py"}),
    ("edit_file", {"path": "calc.py", "old": "a - b", "new": "a + b"}),
    ("shell", {"command": "python3 check.py"}),
]


def narrowed(tools: list[dict[str, Any]], name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the tool of this name with a schema that these arguments alone fit."""
    offered = copy.deepcopy(next(one for one in tools if one["function"]["name"] == name))
    offered["function"]["parameters"] = {
        "type": "object",
        "properties": {key: {"type": "string", "enum": [value]} for key, value in arguments.items()},
        "required": list(arguments),
        "additionalProperties": False,
    }
    return offered


class GuidedEngine(LocalEngine):
    """Narrows each question to the next step's tool and arguments; the grammar does the rest."""

    def guide(self, steps: list[tuple[str, dict[str, Any]]]) -> None:
        self.steps = list(steps)
        self.asked: list[Question] = []

    def ask(self, question: Question) -> AnswerStream:
        self.asked.append(question)
        if not self.steps:
            params = {**question.sampling, "max_tokens": 4}
            return super().ask(Question(question.messages, [], "auto", False, params))
        name, arguments = self.steps.pop(0)
        offered = narrowed(question.tools, name, arguments)
        return super().ask(Question(question.messages, [offered], name, True, question.sampling))


@pytest.fixture(params=["tiny", pytest.param("smollm2", marks=pytest.mark.slow)])
def llm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LLM]:
    if request.param == "tiny":
        folder = make_tiny_llm(tmp_path / "model", max_position_embeddings=16_384)
        with LLM(str(folder), max_model_len=16_384, num_pages=2200) as opened:
            yield opened
        return
    with LLM("smollm2") as opened:
        yield opened


def test_files_are_written_edited_and_a_test_is_run_under_a_grammar(llm: LLM, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    engine = GuidedEngine(llm, "guided", SamplingParams(temperature=0.0))
    engine.guide(STEPS)
    options = AgentOptions(project, ["shell", "write_file", "edit_file"], allow=["*"], sessions=tmp_path / "sessions")
    with open_agent(engine, options) as agent:
        outcome = agent.take("Write calc.py and check it.")
        assert outcome.status == "completed", outcome.error
        ran = [call["function"]["name"] for one in agent.session.state.messages for call in one.get("tool_calls") or ()]
        results = [one for one in agent.session.state.messages if one["role"] == "tool" and one["name"] == "shell"]
        new = outcome.new_tokens
        cached = outcome.cached_tokens
    assert ran == [name for name, _ in STEPS]  # one call for each named tool
    assert (project / "calc.py").read_text() == "def add(a, b):\n    return a + b\n"
    assert "AssertionError" in results[0]["content"] and "exit code 1" in results[0]["content"]
    assert results[-1]["content"].strip() == "fine"
    # Each request computes what is new: the answer before, its result, and at most a page.
    prompts = [engine.count(question) or 0 for question in engine.asked]
    assert cached > 0 and sum(new[1:]) < sum(prompts[1:]) / 2
