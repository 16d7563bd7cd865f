"""The rules of docs/security.md that need no running server. Each test fails when its rule is taken away."""

from __future__ import annotations

import ast
import hmac
import json
import re
import typing
from pathlib import Path
from typing import Any

import pytest

from quire.text.template import ChatTemplate
from quire.types import QuireError
from tests.rules.removals import REMOVALS

ROOT = Path(__file__).parents[2]
MESSAGES = [{"role": "user", "content": "hi"}]
UNSAFE_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
UNSAFE_CALLS = {"eval", "exec", "compile", "torch.load", "np.load", "numpy.load", "os.system", "os.popen"}


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _unsafe(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNSAFE_MODULES:
            found.append(node.module or "")
        elif isinstance(node, ast.Call):
            if _name(node.func) in UNSAFE_CALLS:
                found.append(_name(node.func))
            found += ["shell=True" for k in node.keywords if k.arg == "shell" and getattr(k.value, "value", False)]
    return found


def test_nothing_is_deserialized_or_run_that_can_hold_code() -> None:
    assert _unsafe("import pickle\nexec('x')\nsubprocess.run(x, shell=True)") == ["pickle", "exec", "shell=True"]
    sandboxed = ROOT / "quire/agent/sandbox/child/interpreter.py"  # runs code for a person, in a process of its own
    assert set(_unsafe(sandboxed.read_text(encoding="utf-8"))) == {"exec", "eval", "compile"}
    for path in sorted((ROOT / "quire").rglob("*.py")):
        if path != sandboxed:
            source = path.read_text(encoding="utf-8")
            assert _unsafe(source) == [] and "\nfrom quire.agent.sandbox.child.interpreter" not in source, path


@pytest.mark.parametrize(
    "source",  # none of them writes much, so that nothing but its own rule stops it; without it none does harm
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() | length }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ | length }}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(24) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(24) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set x = 'a' * 9999999 %}",
        "{% set x = '%9999999d' % 1 %}",
        "{% set x = '{:9999999}'.format(1) %}",
        "{% set x = 'a'.center(9999999) %}",
        "{% set x = 'a' | center(9999999) %}",
        "{% set x = '%9999999d' | format(1) %}",
        "{% set x = 9 ** 999999 %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'long' * 99999 }}",
        "{% set _quire_tick = joiner('') %}{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set ns = namespace(x=3) %}{% for i in range(30) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    ],
)
def test_a_template_reaches_nothing_and_builds_nothing_huge(source: str) -> None:
    with pytest.raises(QuireError) as caught:
        ChatTemplate(source, {}, max_chars=100_000).render(MESSAGES)
    assert caught.value.code == "template_error"


def test_a_template_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.text import sandbox

    loops = "{% for a in range(99) %}{% for b in range(99) %}{% endfor %}{% endfor %}"
    assert ChatTemplate(loops, {}).render(MESSAGES) == ""
    monkeypatch.setattr(sandbox, "MAX_TURNS", 5000)
    shadows = ("_quire_tick", "tick", "environment", "context", "budget")  # no variable switches the counting off
    for source in (loops, *(f"{{% set {name} = joiner('') %}}{loops}" for name in shadows)):
        with pytest.raises(QuireError, match="turns"):
            ChatTemplate(source, {}).render(MESSAGES)
    forms = ChatTemplate("{% for a in range(1500) %}{% endfor %}" + "{{ messages[0].content }}", {})
    with pytest.raises(QuireError, match="turns"):  # forms of content are tried within the one budget
        forms.render([{"role": role, "content": "x"} for role in ("user", "assistant")])
    ticks = iter(range(0, 10**6, 2))
    budget = sandbox.RenderBudget(clock=lambda: next(ticks))
    with pytest.raises(OverflowError, match="seconds"):
        for _ in range(5000):
            budget()


def test_every_key_is_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.server.http.keys import KeyRing

    compared: list[Any] = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(a) or real(a, b))
    ring = KeyRing("one,two,three")
    for key in ("one", "three", "wrong", "", None, "o" * 10_000):
        compared.clear()
        ring.opens(key)
        assert len(compared) == 3 and {len(a) for a in compared} == {32}, "and always over the same length"


@pytest.fixture
def fake(tmp_path: Path) -> Any:
    """The whole HTTP application, its loop, and a stub in the engine's place."""
    for package in ("msgspec", "zmq", "fastapi", "prometheus_client", "uvicorn", "tokenizers"):
        pytest.importorskip(package)
    import asyncio

    from tests.fuzz.fake_server import FakeServer

    async def make() -> FakeServer:
        return FakeServer(tmp_path)

    with asyncio.Runner() as runner:
        server = runner.run(make())
        yield server, lambda path, body: runner.run(server.post(path, body))


def test_admin_routes_are_closed_without_a_key(fake: Any) -> None:
    _, post = fake
    status, answer = post("/admin/cancel", b"")
    assert status == 403 and b"admin_closed" in answer


def test_whatever_escapes_is_an_error_in_the_callers_dialect(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server, post = fake
    message = {"role": "user", "content": "secret words"}
    body = json.dumps({"model": "tiny", "messages": [message], "max_tokens": 2}).encode()
    for path in ("/v1/chat/completions", "/v1/messages"):
        assert post(path, body)[0] == 200

    def broken(job: Any) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(server.server.generation, "open", broken)
    for path, place in (("/v1/chat/completions", "code"), ("/v1/messages", "type")):
        status, answer = post(path, body)
        error = json.loads(answer)["error"]
        assert status == 500 and error[place] in ("internal_error", "api_error") and "a bug" not in error["message"]
    assert any("a bug of ours" in line for line in server.lines) and not any("secret" in line for line in server.lines)


def rows_of_the_page() -> dict[str, list[str]]:
    """What the page calls each threat, and the tests it names."""
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8").partition("\n## ")[0]
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| ---")][1:]
    return {row.split("|")[1].strip(): re.findall(r"`(test_\w+)`", row.rsplit("|", 2)[1]) for row in rows}


def test_each_rule_of_the_threat_model_can_be_taken_away_and_is_missed_by_its_test() -> None:
    """The list of removals is whole and fits the sources; `make rules` removes them for real."""
    rows = rows_of_the_page()
    assert len(rows) >= 12 and all(rows.values())
    assert {(r.threat, r.test.split("::")[1].split("[")[0]) for r in REMOVALS} == {
        (threat, test) for threat, tests in rows.items() for test in tests
    }
    for removal in REMOVALS:
        file, name = removal.test.split("::")
        assert f"def {name.split('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), removal.test
        for edit in removal.edits:
            assert (ROOT / edit.file).read_text(encoding="utf-8").count(edit.text) == 1, (removal.rule, edit.text)


def test_ci_audits_the_dependencies() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.search(r"^\s*if ! pip-audit --local ", script, re.MULTILINE) and "exit 1" in script


def test_every_body_is_fuzzed() -> None:
    """A route whose body is in no target would be tried by nobody; `http` and `amplify` grow their cases from seeds."""
    pytest.importorskip("fastapi")
    from quire.server.http.bodies import body_models
    from tests.fuzz.targets import HttpBodies

    paths = [path for path, _ in HttpBodies.seeds()]
    patterns = {route: re.sub(r"\{\w+\}", "[^/]+", route) for route in body_models()}
    missing = [route for route, pattern in patterns.items() if not any(re.fullmatch(pattern, path) for path in paths)]
    assert not missing, "put a body for each into HttpBodies.seeds of tests/fuzz/targets.py"


def test_every_message_between_the_processes_is_fuzzed() -> None:
    pytest.importorskip("msgspec")
    from quire.engine.host import wire
    from tests.fuzz.targets import WireFromEngine, WireToEngine

    for target, kinds in ((WireToEngine, wire.ToEngine), (WireFromEngine, wire.FromEngine)):
        missing = set(typing.get_args(kinds)) - {type(message) for message in target.messages()}
        assert not missing, f"put one of each into {target.__name__}.messages of tests/fuzz/targets.py"
