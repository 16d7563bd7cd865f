"""The rules of docs/security.md that need no running server. Each test fails when its rule is taken away."""

from __future__ import annotations

import ast
import hmac
import re
from pathlib import Path
from typing import Any

import pytest

from quire.text.template import ChatTemplate
from quire.types import QuireError

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
    for path in sorted((ROOT / "quire").rglob("*.py")):
        assert _unsafe(path.read_text(encoding="utf-8")) == [], path


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ 'a' * 999999999 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ 'a'.center(999999999) }}",
        "{{ 'a' | center(999999999) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ 9 ** 999999 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
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
    with pytest.raises(QuireError, match="turns"):
        ChatTemplate(loops, {}).render(MESSAGES)
    ticks = iter(range(0, 10**6, 2))
    budget = sandbox.Budget(clock=lambda: next(ticks))
    with pytest.raises(OverflowError, match="seconds"):
        for _ in range(5000):
            budget()


def test_every_key_is_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.server.keys import KeyRing

    compared: list[Any] = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(a) or real(a, b))
    ring = KeyRing("one,two,three")
    for key in ("one", "three", "wrong", "", None, "o" * 10_000):
        compared.clear()
        ring.opens(key)
        assert len(compared) == 3 and len({len(a) for a in compared}) == 1, "and always over the same length"


def test_each_rule_of_the_threat_model_names_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| ---")][1:]
    assert len(rows) >= 12
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row.rsplit("|", 2)[1])
        assert named, row
        for test in named:
            assert f"def {test}(" in sources, test


def test_ci_audits_the_dependencies() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.search(r"^\s*pip-audit|pip-audit ", script, re.MULTILINE) and "exit 1" in script
