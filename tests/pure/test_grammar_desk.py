"""Requests that wait for their grammars: who waits, who is told what, and that the rest goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from quire.engine.grammar.compile_queue import GrammarQueue
from quire.engine.grammar.matcher import Grammar, GrammarCompiler
from quire.types import GrammarSpec, QuireError, Request, SamplingParams

TOKENS = [*(bytes([byte]) for byte in range(256)), b"<eos>"]
YES = GrammarSpec("choice", '["yes"]')


def request(name: str, grammar: GrammarSpec | None) -> Request:
    made = Request(name, [1], 1, SamplingParams(), 10)
    made.grammar = grammar
    return made


@pytest.fixture
def gated() -> Iterator[tuple[GrammarCompiler, threading.Event]]:
    """A compiler whose only thread is busy until the gate is opened."""
    compiler, gate = GrammarCompiler(TOKENS, (256,), num_threads=1), threading.Event()
    compiler._pool.submit(gate.wait)
    yield compiler, gate
    gate.set()
    compiler.close()


def test_waits_until_it_is_compiled_and_the_next_does_not_wait(gated: tuple[GrammarCompiler, threading.Event]) -> None:
    compiler, gate = gated
    grammars = GrammarQueue(lambda: compiler)
    assert not grammars.take(request("free", None))
    assert grammars.take(request("a", YES)) and len(grammars) == 1 and grammars.ready() == []
    with pytest.raises(QuireError, match="already running"):
        grammars.take(request("a", YES))
    gate.set()
    grammars.wait(60)
    ((found, error),) = grammars.ready()
    assert found.id == "a" and error is None and isinstance(found.grammar, Grammar) and len(grammars) == 0
    again = request("b", YES)
    assert not grammars.take(again) and isinstance(again.grammar, Grammar) and again.grammar is not found.grammar


def test_errors_deadlines_and_those_who_leave(gated: tuple[GrammarCompiler, threading.Event]) -> None:
    compiler, gate = gated
    now = [0.0]
    grammars = GrammarQueue(lambda: compiler, deadline=5.0, clock=lambda: now[0])
    for name in ("slow", "gone"):
        assert grammars.take(request(name, YES))
    dropped = grammars.drop("gone")
    assert dropped is not None and dropped.id == "gone" and grammars.drop("gone") is None
    now[0] = 5.5
    ((found, error),) = grammars.ready()
    assert found.id == "slow" and error is not None and error.code == "grammar_too_complex"
    assert grammars.take(request("bad", GrammarSpec("regex", "(unclosed")))
    gate.set()
    grammars.wait(60)
    ((found, error),) = grammars.ready()
    assert found.id == "bad" and error is not None and error.code == "invalid_schema"
    with pytest.raises(QuireError):
        grammars.take(request("large", GrammarSpec("regex", "a" * 300_000)))  # known at once
